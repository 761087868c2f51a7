"""Stands in for the CPU build of sgl-kernel, which PyPI doesn't have.

SGLang falls back to plain torch for nearly everything on a CPU without AMX; for dense decoders one kernel is
really called. Any other name can be imported, and raises once it is called.
"""

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write the cache slots of request i into row req_pool_indices[i] of the table, columns [start[i],
    end[i]).
    """
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} isn't part of the CPU stand-in")

    absent.__name__ = name
    return absent
