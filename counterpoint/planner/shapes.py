"""Published shapes of transformers into parameters per layer."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Style: TypeAlias = Literal["gpt2", "bert", "llama"]


@dataclass(frozen=True, slots=True)
class Transformer:
    """What a model card says.

    `gpt2`: norms before, learned positions, biases. `bert`: norms after, learned positions and two token types, a
    masked language head. `llama`: root-mean-square norms, rotary positions, a gated MLP, no biases. `tied` heads use
    the embedding's matrix. An `mlp_width` of 0 means four times the width, `num_key_value_heads` of 0 as many as heads.
    """

    name: str
    style: Style
    num_blocks: int
    width: int
    num_heads: int
    vocabulary: int
    sequence_length: int
    mlp_width: int = 0
    num_key_value_heads: int = 0
    tied: bool = True

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.width, self.num_heads, self.vocabulary, self.sequence_length) < 1:
            raise ValueError(f"shape {self.name!r} needs at least one block, head, token and a width")
        if self.width % self.num_heads or self.num_heads % self.key_value_heads:
            raise ValueError(
                f"shape {self.name!r}: width {self.width} must divide into {self.num_heads} heads, "
                f"and those into {self.key_value_heads} key-value heads"
            )

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def key_value_width(self) -> int:
        return self.width // self.num_heads * self.key_value_heads

    @property
    def feed_width(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def gated(self) -> bool:
        return self.style == "llama"

    @property
    def norm_parameters(self) -> int:
        return self.width if self.style == "llama" else 2 * self.width

    @property
    def embedding_parameters(self) -> int:
        words = self.vocabulary * self.width
        match self.style:
            case "llama":
                return words
            case "gpt2":
                return words + _GPT2_POSITIONS * self.width
            case "bert":
                return words + (_BERT_POSITIONS + _BERT_TOKEN_TYPES) * self.width + self.norm_parameters

    @property
    def attention_parameters(self) -> int:
        outputs = (self.width + 2 * self.key_value_width, self.width)
        biases = 0 if self.style == "llama" else sum(outputs)
        return self.width * sum(outputs) + biases + self.norm_parameters

    @property
    def mlp_parameters(self) -> int:
        matrices = (3 if self.gated else 2) * self.width * self.feed_width
        biases = 0 if self.style == "llama" else self.feed_width + self.width
        return matrices + biases + self.norm_parameters

    @property
    def head_parameters(self) -> int:
        matrix = 0 if self.tied else self.vocabulary * self.width
        if self.style == "bert":
            return matrix + self.width * (self.width + 1) + self.norm_parameters + self.vocabulary
        return matrix + self.norm_parameters

    @property
    def num_parameters(self) -> int:
        block = self.attention_parameters + self.mlp_parameters
        return self.embedding_parameters + self.num_blocks * block + self.head_parameters


_GPT2_POSITIONS = 1024
_BERT_POSITIONS = 512
_BERT_TOKEN_TYPES = 2


def gpt2(name: str, num_blocks: int, width: int, num_heads: int, sequence_length: int = 1024) -> Transformer:
    return Transformer(name, "gpt2", num_blocks, width, num_heads, 50257, sequence_length)


def bert(name: str, num_blocks: int, width: int, num_heads: int) -> Transformer:
    return Transformer(name, "bert", num_blocks, width, num_heads, 30522, 512)


# The shapes of GPT-2 10B to 40B are those of Harmony's experiments (4096 wide, 50 blocks per 10B). The paper of
# PipeDream-2BW names its models by size only: 48 x 1920 gives 2.2B, 58 x 2304 gives 3.8B, at its sequences of 512.
SHAPES = (
    Transformer("tiny", "gpt2", 4, 128, 4, 1024, 64),
    gpt2("gpt2-small", 12, 768, 12),
    gpt2("gpt2-medium", 24, 1024, 16),
    gpt2("gpt2-large", 36, 1280, 20),
    gpt2("gpt2-xl", 48, 1600, 25),
    gpt2("gpt2-10b", 50, 4096, 32),
    gpt2("gpt2-20b", 100, 4096, 32),
    gpt2("gpt2-30b", 150, 4096, 32),
    gpt2("gpt2-40b", 200, 4096, 32),
    gpt2("gpt-2.2b", 48, 1920, 20, 512),
    gpt2("gpt-3.8b", 58, 2304, 24, 512),
    bert("bert-large", 24, 1024, 16),
    bert("bert96", 96, 1024, 16),
    Transformer("llama-7b", "llama", 32, 4096, 32, 32000, 2048, mlp_width=11008, tied=False),
    Transformer("llama-8b", "llama", 32, 4096, 32, 128256, 2048, mlp_width=14336, num_key_value_heads=8, tied=False),
)
