"""What aot.py compiles: every kernel, the types of its arguments, and the variants that are worth the time.

A new kernel needs an entry in ``SPECS``, and one in ``TYPES`` for each argument whose name is not there yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# What each argument is, by its name, for every kernel; a spec can say otherwise.
#   *fp32, *i64, *u1   pointer to 16-byte aligned memory; *T: to the dtype of the problem
#   tile BLOCK_M BLOCK_K  an operand: a TMA descriptor of blocks [BLOCK_M, BLOCK_K] where the plan uses TMA, else *T
#   i32, i32:16, fp32  a number; :16 for one that is a multiple of 16
#   size               a number; no multiple of 16 in variants named "… everything" and "odd", as vocabularies are or are not
#   … if FLAG, … if FLAG and FLAG  None unless those constexprs are true
#   tile … unless FLAG *T where that constexpr is true
TYPES = {
    "hidden": "tile BLOCK_M BLOCK_K",
    "weight": "tile BLOCK_N BLOCK_K",
    "bias": "*T if HAS_BIAS",
    "labels": "*i64",
    "PASSES": "i32",
    "num_tokens": "i32",
    "vocab_size": "size",
    "hidden_size": "i32:16",
    "hidden_stride": "i32:16",
    "weight_stride": "i32:16",
    "ignore_index": "i32",
    "logit_scale": "fp32",
    "softcap": "fp32",
    "label_smoothing": "fp32",
    "z_loss": "fp32",
    "tile_lse": "*fp32",
    "tile_sum": "*fp32 if WANT_MEAN",
    "tile_expectation": "*fp32 if WANT_ENTROPY",
    "tile_lse2": "*fp32 if WANT_SQ",
    "tile_max": "*fp32 if WANT_TOP1",
    "lse": "*fp32",
    "label_logit": "*fp32",
    "factor": "*fp32",
    "loss": "*fp32",
    "grad": "*fp32",
    "grad_lse": "*fp32",
    "grad_label": "*fp32",
    "tile_ratio": "*bf16",
    "tile_damping": "*bf16",
    "tile_stride": "i32:16",
    "vocab_perm": "*i32",
    "inv_vocab_perm": "*i32",
    "token_perm": "*i64",
    "energy": "*fp32",
    "part": "*fp32",
    "tau": "*fp32",
    "mass": "*T",
    **dict.fromkeys(("kept_slot", "kept_counts", "counts", "sums", "first_kept", "flags"), "*i32"),
    **dict.fromkeys(("pass_of", "pass_block", "pass_start"), "*i32"),
    **dict.fromkeys(("tiles", "tile_rows", "row_pass", "row_order"), "*i32"),
    "row_tiles": "*i64",
    **dict.fromkeys(
        (
            "num_row_blocks",
            "num_col_blocks",
            "num_programs",
            "num_tiles",
            "pass_number",
            "room",
            "first",
        ),
        "i32",
    ),
    "v": "size",
    "d": "i32:16",
}


@dataclass(frozen=True)
class Spec:
    """One kernel. Constexprs that neither plan nor launch give as a literal are flags: all off, and all on."""

    kernel: str  # module.function, below hf_cce.kernels
    plan: str | None = None  # a key of PLANS; None: nothing depends on dtype or device, compiled once an architecture
    types: dict[str, str] = field(default_factory=dict)  # beyond TYPES, or against it
    constants: dict[str, Any] = field(default_factory=dict)  # constexprs and so on that the launch computes
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # instead of all off and all on: name -> flags
    archs: tuple[int, ...] = ()  # the only architectures it is for

    @property
    def name(self) -> str:
        return self.kernel.rpartition(".")[2]


OF_TOKENS = {"WANT_ENTROPY": True, "WANT_TOP1": True}
TOKEN_FLAGS = dict.fromkeys(("HAS_BIAS", "HAS_SCALE", "HAS_SOFTCAP"), True)
WANTS = dict.fromkeys(("WANT_MEAN", "WANT_ENTROPY", "WANT_SQ", "WANT_TOP1"), True)
GATHERED = {"plain": {}, "gather": {"GATHER": True}}
# Of 8,192 tokens and a vocabulary of 152,064: what the launches of hf_cce.kernels.filter.select compute
ROWS, COLS = {"ROWS": 64}, {"COLS": 2048}

PAIR = {
    "teacher_hidden": "tile BLOCK_M BLOCK_K unless GIVEN",
    "teacher_weight": "tile BLOCK_N BLOCK_K unless GIVEN",
    "teacher_bias": "*T if TEACHER_HAS_BIAS",
    "num_valid": "*i64",
    "teacher_lse": "*fp32",
    **dict.fromkeys(("teacher_hidden_size", "teacher_hidden_stride", "teacher_weight_stride"), "i32:16"),
    **dict.fromkeys(("teacher_logit_scale", "teacher_softcap", "beta"), "fp32"),
}
PAIR_FLAGS = {**TOKEN_FLAGS, **{f"TEACHER_{name}": True for name in TOKEN_FLAGS}}

HOPPER = {
    "active": "*i32",
    "tile_ratio": "*bf16 if WANT_RATIO",
    "out_width": "i32:16",
    "first_col": "i32",
    "width": "size",
}

SPECS = (
    Spec(
        "forward._tile_stats_kernel",
        plan="forward",
        types={
            "tile_ratio": "*bf16 if WANT_RATIO",
            "tile_damping": "*bf16 if WANT_RATIO and HAS_SOFTCAP",
            "exp_cache": "*T if STORE",
            "cache_width": "i32:16",
            "first_col": "i32",
        },
        variants={
            "plain": {},
            "store": {"STORE": True},
            "store everything": {"STORE": True, **TOKEN_FLAGS},
            "everything": {**WANTS, **TOKEN_FLAGS},
        },
    ),
    Spec(
        "forward._tile_stats_kernel",
        plan="filter forward",
        types={
            "tile_ratio": "*bf16 if WANT_RATIO",
            "tile_damping": "*bf16 if WANT_RATIO and HAS_SOFTCAP",
            "exp_cache": "*T if STORE",
            "cache_width": "i32:16",
            "first_col": "i32",
            "labels": "*i32",
        },
        variants={
            "ratio": {"WANT_RATIO": True},
            "ratio everything": {"WANT_RATIO": True, **TOKEN_FLAGS},
            "ratio tokens": {"WANT_RATIO": True, **OF_TOKENS},
        },
    ),
    Spec(
        "hopper._hopper_tiles_kernel",
        plan="hopper",
        archs=(90,),
        types={**HOPPER, **dict.fromkeys(("lse", "grad_lse", "label_logit", "out"), "* if STORE")},
        variants={
            "stats": {"STAT_N": 128},
            "stats of wide tiles": {"STAT_N": 256},
            "ratio": {"STAT_N": 128, "WANT_RATIO": True},
            "ratio everything": {"STAT_N": 256, "WANT_RATIO": True, "HAS_SCALE": True},
        },
    ),
    Spec(
        "hopper._hopper_tiles_kernel",
        plan="hopper stores",
        archs=(90,),
        types={
            **HOPPER,
            "lse": "*fp32 if GRADIENT",
            "grad_lse": "*fp32 if GRADIENT",
            "label_logit": "*fp32 if STORE",
            "out": "tile HALF STORE_N",
        },
        constants={"HALF": 64},
        variants={
            "store": {"STAT_N": 128, "STORE": True},
            "gradient": {"STAT_N": 128, "GRADIENT": True},
            "store everything": {"STAT_N": 256, "STORE": True, "HAS_SCALE": True},
            "gradient everything": {"STAT_N": 128, "GRADIENT": True, "HAS_SCALE": True},
        },
    ),
    Spec(
        "backward._label_entries_kernel",
        types={"out": "*T", "out_stride": "i32:16", "slab_start": "i32", "slab_width": "size"},
    ),
    Spec(
        "backward._logit_gradient_kernel",
        plan="backward",
        types={
            "out": "*T",
            "out_stride": "i32:16",
            "slab_start": "i32",
            "slab_width": "size",
            "flags": "*i32 if FLAGGED",
            "entropy": "*fp32 if HAS_ENTROPY",
            "grad_mean": "*fp32 if HAS_MEAN",
            "grad_entropy": "*fp32 if HAS_ENTROPY",
        },
    ),
    Spec(
        "filter.sparse._kept_tiles_kernel",
        plan="kept tiles",
        types={"weight": "tile BLOCK_N BLOCK_K unless GATHER", "labels": "*i32", "scratch": "*T"},
        variants={
            **GATHERED,
            "everything": TOKEN_FLAGS,
            "gather everything": {"GATHER": True, **TOKEN_FLAGS},
        },
    ),
    Spec(
        "filter.sparse._hidden_gradient_kernel",
        plan="hidden gradient",
        types={
            "scratch": "tile BLOCK_M BLOCK_K",
            "weight": "tile BLOCK_K BLOCK_D unless GATHER",
            "total": "*fp32",
            "out": "*T",
        },
        variants=GATHERED,
    ),
    Spec(
        "filter.sparse._weight_gradient_kernel",
        plan="weight gradient",
        types={
            "scratch": "tile BLOCK_K BLOCK_N",
            "hidden": "tile BLOCK_K BLOCK_D",
            "block_sums": "*fp32",
            "block_mass": "*fp32 if CORRECTED",
            "row_coeffs": "*T if CORRECTED",
            "basis": "*T if CORRECTED",
            "out": "*T",
        },
        constants={"RANK": 16},
        variants={"plain": {"CORRECTED": True}, "odd": {"IN_PLACE": True}},
    ),
    Spec(
        "filter.sparse._reorder_rows_kernel",
        plan="filter blocks",
        types={"gradient": "*T", "buffer": "*T", "first": "i32:16", "width": "i32:16"},
    ),
    Spec("filter.order._invert_order_kernel", types={"by_logit": "*i64", "padded": "i32:16"}),
    Spec(
        "filter.order._sort_by_counting_kernel",
        types={"keys": "*i16", "columns": "*i32", "labels": "*i32"},
        constants={"BLOCK_R": 16},
    ),
    Spec("filter.order._sort_keys_kernel", types={"columns": "*i32", "keys": "*i16"}, constants={"FINE": 16384}),
    Spec(
        "filter.order._permute_rows_kernel",
        plan="filter blocks",
        types={"weight": "*T", "out": "*T", "means": "*T", "first_block": "i32", "stride": "i32:16"},
    ),
    Spec(
        "filter.corrections._row_coeffs_kernel",
        plan="filter blocks",
        types={"product": "*fp32", "out": "*T"},
        constants={"SIZE": 16},
    ),
    Spec(
        "filter.corrections._mass_weighted_hidden_kernel",
        types={"hidden": "*T", "mass": "*fp32", "out": "*T", "num_tiles": "i32", "out_stride": "i32:16"},
        variants={"plain": {}, "transposed": {"TRANSPOSED": True}, "absolute": {"ABSOLUTE": True}},
    ),
    Spec(
        "filter.corrections._centered_rows_kernel",
        plan="filter blocks",
        types={"weight": "*T", "scale": "*fp32", "out": "*T", "first_block": "i32", "stride": "i32:16"},
    ),
    Spec(
        "filter.select._tile_energy_kernel",
        plan="filter blocks",
        types={"labels": "*i32", "span": "i32"},
    ),
    Spec("filter.select._count_kernel"),
    Spec("filter.select._sum_counts_kernel"),
    Spec("filter.select._choose_tiles_kernel", constants=ROWS),
    Spec("filter.select._divide_passes_kernel", constants=COLS),
    Spec("filter.select._list_tiles_kernel", constants={"PASSES_2": 16}),
    Spec("filter.select._longest_first_kernel", constants=ROWS),
    Spec(
        "filter.select._mass_kernel",
        plan="filter blocks",
        types={
            "labels": "*i32",
            "tile_damping": "*bf16 if HAS_DAMPING",
            **dict.fromkeys(("probability", "tile_mass", "token_mass"), "*fp32"),
        },
        constants={"GROUP": 16},
    ),
    Spec(
        "labels._label_logit_kernel",
        plan="labels",
        types={
            "hidden": "*T",
            "weight": "*T",
            "out": "*fp32",
            "vocab_perm": "*i32 if GATHER",
            "active": "*i32 if BLOCK_M",
            "token_perm": "*i64 if SORT",
            "sorted_hidden": "*T if SORT",
        },
        variants={
            "plain": {"BLOCK_M": 0},
            "sorted": {"BLOCK_M": 128, "GATHER": True, "SORT": True},
            "everything": {"BLOCK_M": 128, "HAS_BIAS": True, "HAS_SOFTCAP": True},
        },
    ),
    Spec(
        "exp_cache._exp_to_dlogits_kernel",
        plan="backward blocks",
        types={"values": "*T", "first_col": "i32", "width": "i32:16"},
    ),
    Spec(
        "token_groups._factors_kernel",
        plan="backward blocks",
        types={
            "values": "*T",
            "scale": "*fp32",
            "of_label": "*fp32",
            "stride": "i32:16",
        },
    ),
    Spec(
        "token_groups._finish_hidden_kernel",
        types={
            **dict.fromkeys(("product", "scale", "of_label"), "*fp32"),
            "weight": "*T",
            "out": "*T",
            "first_row": "i32",
            "num_rows": "i32",
        },
        constants={"BLOCK_R": 16},
    ),
    Spec("token_groups._multiply_kernel", plan="backward blocks", types={"x": "*T", "by": "*fp32", "size": "i32:16"}),
    # of logits in float32, and in the dtype of the inputs
    *(
        Spec(f"materialized._row_{name}_kernel", plan=plan, types={"logits": logits, "stride": "i32:16", **types})
        for plan, logits in ((None, "*fp32"), ("own blocks", "*T"))
        for name, types in (("stats", {}), ("gradient", {"out": "*T", "out_stride": "i32:16"}))
    ),
    Spec(
        "divergence._pair_stats_kernel",
        plan="backward",
        types={
            **PAIR,
            **dict.fromkeys(("tile_teacher_lse", "tile_gap", "tile_divergence"), "*fp32"),
        },
        variants={
            "plain": {"KIND": 0},
            "everything": {"KIND": 1, "WANT_ENTROPY": True, **PAIR_FLAGS},
            "jsd": {"KIND": 2},
            "given": {"KIND": 1, "GIVEN": True},
        },
    ),
    Spec(
        "divergence._pair_gradient_kernel",
        plan="backward",
        types={**PAIR, "offset": "*fp32", "out": "*T", "out_stride": "i32:16"},
        variants={
            "plain": {"KIND": 0},
            "everything": {"KIND": 1, **PAIR_FLAGS},
            "jsd": {"KIND": 2},
            "given": {"KIND": 1, "GIVEN": True},
        },
    ),
    Spec(
        "forward._combine_kernel",
        types={
            "mean_logit": "*fp32 if WANT_MEAN",
            "entropy": "*fp32 if WANT_ENTROPY",
            "log_sum_sq": "*fp32 if WANT_SQ",
            "is_top1": "*u1 if WANT_TOP1",
        },
    ),
    Spec(
        "labels._validate_labels_kernel",
        types={"num_items": "*i64 if HAS_ITEMS", "divisor": "fp32", "ok": "*u1"},
        variants={"plain": {}, "items": {"HAS_ITEMS": True}, "divisor": {"HAS_DIVISOR": True}},
    ),
    Spec("loss._total_loss_kernel", types={"mean_logit": "*fp32 if SMOOTH"}),
    Spec("loss._token_gradients_kernel", types={"grad_mean": "*fp32 if SMOOTH"}),
)
