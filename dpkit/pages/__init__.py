"""Reports as pages that need nothing else, for whoever measures.

`page` is what stands around a report, `svg` draws its plots. They know nothing of what is told.
"""
