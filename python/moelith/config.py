"""What a layer computes (LayerConfig) and how it is run (PlanOptions).

The fields, their defaults and their meaning are those of include/moelith/config.hpp and layer.hpp; they are checked by
the C++ library when the layer is first used or when `LayerConfig.validate` is called. The element type is no part of a
LayerConfig: it is that of the tensors.
"""

import dataclasses
import functools
import hashlib
import json
import numbers
from dataclasses import dataclass
from pathlib import Path


_WEIGHT_KINDS = ("gate_up_proj", "gate_up_bias", "down_proj", "down_bias")


def _canonical_json(instance, leave_out=()):
    fields = {k: v for k, v in dataclasses.asdict(instance).items() if k not in leave_out}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value):
    """The Python number of a number of another library (numpy.int64)."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r}, a {type(value).__name__}; accepted: bool, int, float, str")


@functools.cache
def _library() -> str:
    from moelith import _moelith

    return hashlib.sha256(Path(_moelith.__file__).read_bytes()).hexdigest()[:16]


def _check_field(name, value, accepted):
    if not isinstance(value, accepted):
        names = " or ".join(kind.__name__ for kind in (accepted if isinstance(accepted, tuple) else (accepted,)))
        raise TypeError(f"{name}: {value!r}, a {type(value).__name__}; accepted: {names}")


@dataclass(frozen=True)
class Activation:
    """kind: swiglu, swiglu_clamped (GPT-OSS), geglu_erf, geglu_tanh, relu_squared (no gate: gate_up_proj has I rows)."""

    kind: str = "swiglu"
    limit: float = 7.0  # swiglu_clamped only, as the next two
    alpha: float = 1.702
    up_offset: float = 1.0

    @property
    def gated(self):
        return self.kind != "relu_squared"


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token passes. gated: scaled by sigmoid(shared_gate_logits[:, s]) (Qwen2-MoE)."""

    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True)
class Router:
    """kind: softmax_topk (Mixtral, Qwen3, OLMoE), topk_softmax (GPT-OSS), sigmoid (DeepSeek-V3)."""

    kind: str = "softmax_topk"
    renormalize: bool = False
    scaling_factor: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score_size: int = 2
    aux_loss: str = "none"  # none, batch, sequence, global
    aux_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    capacity_factor: float = 0.0  # 0: no token is dropped
    drop_policy: str = "by_score"  # by_score, by_position


@dataclass(frozen=True)
class LayerConfig:
    hidden_size: int  # H, a multiple of 8
    intermediate_size: int  # I, a multiple of 8
    num_experts: int  # E, over all ranks of an expert-parallel group
    top_k: int
    activation: Activation = Activation()
    gate_up_bias: bool = False
    down_bias: bool = False
    weight_placement: str = "after_down"  # after_down, before_down
    shared_experts: tuple[SharedExpert, ...] = ()
    router: Router = Router()

    def __post_init__(self):
        _check_field("activation", self.activation, Activation)
        _check_field("router", self.router, Router)
        _check_field("shared_experts", self.shared_experts, (tuple, list))
        object.__setattr__(self, "shared_experts", tuple(self.shared_experts))
        for s, shared in enumerate(self.shared_experts):
            _check_field(f"shared_experts[{s}]", shared, SharedExpert)
        object.__setattr__(self, "_key", _canonical_json(self))
        given = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        kinds = [kind for kind in _WEIGHT_KINDS if given.get(kind, True)]
        owners = ("", *(f"shared.{s}." for s in range(len(self.shared_experts))))
        object.__setattr__(self, "_weights", tuple(owner + kind for owner in owners for kind in kinds))

    @property
    def key(self) -> str:
        """This config as JSON text: equal for equal configs."""
        return self._key

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the layer's weights: "gate_up_proj", ..., "shared.0.gate_up_proj", ..."""
        return self._weights

    @staticmethod
    def from_key(key: str) -> "LayerConfig":
        fields = json.loads(key)
        return LayerConfig(
            **fields
            | {
                "activation": Activation(**fields["activation"]),
                "shared_experts": tuple(SharedExpert(**shared) for shared in fields["shared_experts"]),
                "router": Router(**fields["router"]),
            }
        )

    def gate_up_rows(self, intermediate_size: int) -> int:
        """Rows of gate_up_proj of an expert of this width: 2 I, or I for an activation without a gate."""
        return 2 * intermediate_size if self.activation.gated else intermediate_size

    @property
    def any_shared_gate(self) -> bool:
        return any(shared.gated for shared in self.shared_experts)

    def validate(self, dtype: str = "float32") -> None:
        """Raises ValueError that names the field, its value and what is accepted."""
        native_config(self.key, dtype).validate()


@dataclass(frozen=True)
class PlanOptions:
    """How a layer is run. Results depend on none of these, except that experts are spread over the ranks of `group`.

    max_tokens: the largest number of tokens of any call on this rank. None, allowed for a group of one rank only: as
        many as come (plans are made for 64, 128, 256, ... tokens as needed).
    workers: CPU threads, or SMs of the GPU; 0: all that the process may use, shared evenly by those ranks of the group
        that may use the same.
    recompute: keep x and the routing table only; backward runs gate_up again.
    receive_capacity_factor: several ranks: the routed rows that buffers have room for, as a multiple of those that a
        balanced routing brings a rank; rows beyond are worked through in rounds. 0: chosen by the plan, 1.25 on
        a CPU, math.inf on a GPU; math.inf: room for every row that may come.
    group: a moelith.Group; None: a group of one rank.
    expert_rank: the rank of each expert; empty: contiguous blocks of experts.
    tile_columns, shuffle_seed: for tests and tuning.
    """

    max_tokens: int | None = None
    workers: int = 0
    recompute: bool = False
    receive_capacity_factor: float = 0.0
    group: object = None
    expert_rank: tuple[int, ...] = ()
    tile_columns: int = 0
    shuffle_seed: int = 0

    def __post_init__(self):
        if self.group is not None and not hasattr(self.group, "handle"):
            raise TypeError(f"group: {self.group!r}, a {type(self.group).__name__}; accepted: Group, None")
        object.__setattr__(self, "expert_rank", tuple(self.expert_rank))
        plain = dataclasses.replace(self, group=None) if self.group is not None else self
        fields = {"library": _library(), **json.loads(_canonical_json(plain, leave_out=("group",)))}
        object.__setattr__(self, "_key", json.dumps(fields, sort_keys=True, separators=(",", ":")))
        object.__setattr__(self, "_group_handle", self.group.handle if self.group is not None else "0")

    @property
    def key(self) -> str:
        """These options, except the group, as JSON text; with what tells builds of the library apart, since code that
        torch.compile keeps on disk has sizes of buffers in it."""
        return self._key

    @property
    def group_handle(self) -> str:
        return self._group_handle


def assign(native, fields):
    """Sets the fields of a C++ config; a TypeError names the field."""
    for name, value in fields.items():
        try:
            setattr(native, name, value)
        except TypeError:
            accepted = type(getattr(native, name)).__name__
            raise TypeError(f"{name}: {value!r}, a {type(value).__name__}; accepted: {accepted} in range") from None
    return native


@functools.lru_cache(maxsize=None)
def native_config(key: str, dtype: str):
    """The C++ LayerConfig of LayerConfig.key; shared, so it must not be changed."""
    from moelith import _moelith

    fields = json.loads(key)
    fields["activation"] = assign(_moelith.ActivationConfig(), fields["activation"])
    fields["router"] = assign(_moelith.RouterConfig(), fields["router"])
    fields["shared_experts"] = [assign(_moelith.SharedExpertConfig(), shared) for shared in fields["shared_experts"]]
    return assign(_moelith.LayerConfig(), fields | {"dtype": dtype})


def python_config(native) -> LayerConfig:
    """The LayerConfig of a C++ one; without its dtype, which is that of the tensors here."""
    return LayerConfig(
        **_members(native, LayerConfig)
        | {
            "activation": Activation(**_members(native.activation, Activation)),
            "shared_experts": tuple(SharedExpert(**_members(shared, SharedExpert)) for shared in native.shared_experts),
            "router": Router(**_members(native.router, Router)),
        }
    )


def _members(native, kind):
    return {field.name: getattr(native, field.name) for field in dataclasses.fields(kind)}
