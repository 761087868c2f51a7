"""Sandbox back-ends behind polar.sandbox: `docker`, and `local` for machines without a container engine."""
