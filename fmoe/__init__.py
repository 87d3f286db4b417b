"""fmoe runs mixture-of-experts language models with pure functions."""

from .completion import Completion as Completion
from .completion import StreamedToken as StreamedToken
from .completion import TokenLogprobs as TokenLogprobs
from .generation import generate as generate
from .generation import logits as logits
from .generation import score as score
from .generation import stream as stream
from .generation import stream_tokens as stream_tokens
from .model import Model as Model
from .model import load as load
from .prefilling import prefill as prefill
from .prompts import decode as decode
from .prompts import encode as encode
from .states import State as State
from .states import load_state as load_state
from .states import save_state as save_state
from .tuning import tune as tune
