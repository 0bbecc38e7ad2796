"""HTTP for a cluster: an HTTP/1.1 server on Trio, and what is served over it.

`face` is what the two halves know of each other. `http` and its neighbours carry requests and
answers and know nothing of language models; routes answer and know nothing of sockets.
"""
