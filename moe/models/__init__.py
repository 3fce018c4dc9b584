"""Whole models made of layers."""

from __future__ import annotations

from moe.models.config import TransformerConfig
from moe.models.groups import fit_groups
from moe.models.transformer import DecodeCache, Stats, Transformer

__all__ = ["DecodeCache", "Stats", "Transformer", "TransformerConfig", "fit_groups"]
