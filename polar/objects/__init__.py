"""The object store: results, captures, artifacts, uploads. One narrow interface, a folder and an S3 back-end."""

from polar.objects.base import ObjectStore, open_objects

__all__ = ["ObjectStore", "open_objects"]
