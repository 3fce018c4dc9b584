"""From a trained model to text: beam search, and translation of sentences with it."""

from moe.decoding.search import Hypotheses, SearchConfig, beam_search

__all__ = ["Hypotheses", "SearchConfig", "beam_search"]
