"""Decisions without I/O: what a host can still grant (ledger), which hosts to use (placement) in which cluster."""
