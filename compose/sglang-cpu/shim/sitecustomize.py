"""Python runs this at start-up when the folder is on PYTHONPATH: it makes PyPI's torchvision importable.

The torchvision wheel brings operators compiled for CUDA, which can't load beside a CPU torch, and its Python
part then fails on operators nobody has declared. Declaring the two signatures just before its import is
enough; SGLang never calls them.
"""

import importlib.abc
import sys


class _DeclareVisionOps(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        """Declare the operators on the first import of torchvision, then leave the import to the others."""
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        ops = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            ops.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.polar_vision_ops = ops  # the declarations live as long as this object
        return None


sys.meta_path.insert(0, _DeclareVisionOps())
