"""From a trained model to text: beam search, and translation of sentences with it."""

from moe.decoding.search import Hypotheses, SearchConfig, beam_search
from moe.decoding.translate import DecodingConfig, translate

__all__ = ["DecodingConfig", "Hypotheses", "SearchConfig", "beam_search", "translate"]
