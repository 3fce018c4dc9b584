"""Whole models made of layers."""

from __future__ import annotations

from moe.models.transformer import DecodeCache, Stats, Transformer, TransformerConfig

__all__ = ["DecodeCache", "Stats", "Transformer", "TransformerConfig"]
