"""Other architectures, computed by `transformers` with our batch and our paged cache.

Its models let one register an attention function by name: ours stores and attends as our own
transformer does. Everything else of a layer is theirs, at their speed. Knows nothing of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpkit.engine.models.torch.architecture import named_architecture, read_shape
from dpkit.engine.models.torch.attention import attend
from dpkit.errors import ModelUnsupported, describe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dpkit.checkpoint import Checkpoint
    from dpkit.engine.models.torch.batch import TensorBatch

_NAME = "dpkit"

# What some layers do to attention that ours does not; a model that has one is refused.
_OPTIONS = ("attn_logit_softcapping", "attention_chunk_size")


class HfTransformer:
    """A causal language model of transformers; called as our `Transformer` is."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Load it.

        Raises:
            ModelUnsupported: transformers is missing, does not know it, or it needs an attention
                that is not ours.
        """
        name = named_architecture(checkpoint.path, checkpoint.config)
        where = f"{checkpoint.path}: architecture {name}"
        try:
            import transformers  # noqa: PLC0415 - a second, and for few
        except ModuleNotFoundError as error:
            raise ModelUnsupported(
                f"{where} is not dpkit's own; `pip install 'dpkit[hf]'` brings transformers, which "
                "may know it"
            ) from error
        transformers.AttentionInterface.register(_NAME, _attention)
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint.path, dtype=dtype, attn_implementation=_NAME, local_files_only=True
            )
        except Exception as error:  # whatever other people's code makes of a damaged file
            raise ModelUnsupported(
                f"{where}: transformers cannot load it: {describe(error)}"
            ) from error
        config = model.config.get_text_config().to_dict()
        if option := next((option for option in _OPTIONS if config.get(option)), None):
            raise ModelUnsupported(f"{where} needs {option}, which is not supported")
        self._model = model.to(device)
        self.architecture = read_shape(checkpoint.path, config)
        self.dtype, self.device = dtype, device

    def __call__(self, step: TensorBatch, cache: Tensor) -> Tensor:
        """Compute one step: see `Transformer`."""
        outputs = self._model(
            input_ids=step.token_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=step.sampled,
            dpkit_step=step,
            dpkit_cache=cache,
        )
        scores: Tensor = outputs.logits[0]
        return scores


def _attention(
    module: Any,  # a layer's attention of any model
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    dpkit_step: TensorBatch,
    dpkit_cache: Tensor,
    **_others: Any,
) -> tuple[Tensor, None]:
    """One layer's, [1, heads, tokens, head_dim] each."""
    queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
    cache = dpkit_cache[module.layer_idx]
    return attend(queries, keys, values, cache, dpkit_step, scale=scaling)[None], None
