"""fmoe runs mixture-of-experts language models with pure functions."""

from .generation import Completion as Completion
from .generation import StreamedToken as StreamedToken
from .generation import TokenLogprobs as TokenLogprobs
from .generation import generate as generate
from .generation import logits as logits
from .generation import score as score
from .generation import stream as stream
from .generation import stream_tokens as stream_tokens
from .model import Model as Model
from .model import load as load
