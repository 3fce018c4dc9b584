"""Small Hugging Face layers with random weights, behind numpy: what the parity tests compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.models.mixtral import modeling_mixtral
from transformers.models.nllb_moe import modeling_nllb_moe
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.switch_transformers import modeling_switch_transformers

from tests.parity.compare import D_MODEL, NUM_EXPERTS

D_HIDDEN = 11
TINY_MODEL = {
    "vocab_size": 17,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A torch layer with numpy at its edges.

    Attributes:
      module: the layer.
      forward: y_BLM of x_BLM.
      weights: of the flat tokens: the weight each gives each expert, 0 where it is not sent.
    """

    module: torch.nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    weights: Callable[[torch.Tensor], torch.Tensor]

    def tensors(self) -> dict[str, np.ndarray]:
        """Weights by the peer's own names."""
        return {name: value.numpy().copy() for name, value in self.module.state_dict().items()}

    def __call__(self, x_BLM: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.forward(torch.tensor(x_BLM)).numpy()

    def weights_TE(self, x_BLM: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.weights(torch.tensor(x_BLM)).flatten(0, -2).numpy()

    def gradients(self, x_BLM: np.ndarray, cotangent_BLM: np.ndarray):
        """Of sum(y * cotangent): with respect to the input, and to the weights by name."""
        x = torch.tensor(x_BLM, requires_grad=True)
        self.module.zero_grad(set_to_none=False)
        torch.sum(self.forward(x) * torch.tensor(cotangent_BLM)).backward()
        return x.grad.numpy(), {
            name: np.zeros(value.shape) if value.grad is None else value.grad.numpy()
            for name, value in self.module.named_parameters()
        }


# Switch Transformers


def switch(*, capacity: int, **settings) -> Peer:
    """`capacity` is of one expert for one sequence, in training and evaluation alike."""
    config = SwitchTransformersConfig(
        d_model=D_MODEL,
        d_ff=D_HIDDEN,
        num_experts=NUM_EXPERTS,
        expert_capacity=capacity,
        dropout_rate=0.0,
        **{"router_jitter_noise": 0.0, **settings},
    )
    module = _random(modeling_switch_transformers.SwitchTransformersSparseMLP(config))

    def weights(x_BLM):
        kept_BLE, prob_BL1, _ = module.router(x_BLM)
        return kept_BLE * prob_BL1

    return Peer(module, module, weights)


def switch_losses(logits_of_layers: Sequence[np.ndarray]) -> tuple[float, float]:
    """Balance and z-loss of a model's layers, as its training loss takes them."""
    model = SwitchTransformersForConditionalGeneration
    logits, chosen = model._unpack_router_logits(
        None, [torch.tensor(logits_BLE.copy()) for logits_BLE in logits_of_layers]
    )
    return (
        modeling_switch_transformers.load_balancing_loss_func(logits.softmax(-1), chosen).item(),
        modeling_switch_transformers.router_z_loss_func(logits).item(),
    )


def switch_model_losses(*, sparse_step: int) -> tuple[float, float]:
    """Balance losses of encoder and decoder of a whole model whose every n-th layer is sparse."""
    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        vocab_size=17,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_heads=2,
        num_experts=3,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=2 // sparse_step,
        num_sparse_decoder_layers=2 // sparse_step,
        decoder_start_token_id=0,
    )
    assert config.encoder_sparse_step == sparse_step
    ids = torch.arange(10).reshape(2, 5)
    model = SwitchTransformersForConditionalGeneration(config)
    out = model(input_ids=ids, labels=ids, output_router_logits=True)
    losses = (out.encoder_aux_loss, out.decoder_aux_loss)  # numbers, not tensors, when left out
    return tuple(float(loss.detach() if torch.is_tensor(loss) else loss) for loss in losses)


# NLLB-MoE


def nllb(**settings) -> Peer:
    """The layer as it ships."""
    config = NllbMoeConfig(
        d_model=D_MODEL,
        num_experts=NUM_EXPERTS,
        activation_dropout=0.0,
        **{"moe_token_dropout": 0.0, **settings},
    )
    module = _random(modeling_nllb_moe.NllbMoeSparseMLP(config, D_HIDDEN))
    return Peer(module, module, lambda x_BLM: module.router(x_BLM.flatten(0, 1))[1])


def corrected_nllb(padding_BL: np.ndarray | None = None, **settings) -> Peer:
    """Its router and its experts, each expert on the tokens that the router weighs it with."""
    module = nllb(**settings).module
    padding_T = None if padding_BL is None else torch.tensor(padding_BL).flatten()

    def weights(x_BLM):
        return module.router(x_BLM.flatten(0, 1), padding_T)[1]

    def forward(x_BLM):
        x_TM, weight_TE = x_BLM.flatten(0, 1), weights(x_BLM)
        y_TM = torch.zeros_like(x_TM)
        for e in range(NUM_EXPERTS):
            (rows,) = torch.nonzero(weight_TE[:, e], as_tuple=True)
            said = module.experts[f"expert_{e}"](x_TM[rows])
            y_TM = y_TM.index_add(0, rows, weight_TE[rows, e, None] * said)
        return y_TM.reshape(x_BLM.shape)

    return Peer(module, forward, weights)


def nllb_expert(peer: Peer, number: int, x_TM: np.ndarray) -> np.ndarray:
    """What one expert says to every token."""
    with torch.no_grad():
        return peer.module.experts[f"expert_{number}"](torch.tensor(x_TM)).numpy()


def nllb_masking_factors(x_BLM: np.ndarray, *, rate: float, training: bool) -> np.ndarray:
    """What output masking multiplies each number with, where one expert has all the weight."""

    def run(rate, training):
        module = nllb(moe_token_dropout=rate).module.train(training)
        torch.manual_seed(0)
        with torch.no_grad():
            module.router.classifier.weight *= 1000
            return module(torch.tensor(x_BLM)).numpy()

    return run(rate, training) / run(0.0, False)


def nllb_capacity(peer: Peer, x_BLM: np.ndarray, *, training: bool) -> int:
    """Slots of an expert in a call that is made now."""
    peer.module.train(training)
    peer(x_BLM)
    return peer.module.router.expert_capacity


def nllb_kept_second_choices(*, num_tokens: int, num_experts: int, capacity: int) -> int:
    """How many second choices the random policy keeps where all experts are equally probable."""
    torch.manual_seed(0)
    config = NllbMoeConfig(
        d_model=D_MODEL,
        num_experts=num_experts,
        expert_capacity=capacity,
        second_expert_policy="random",
    )
    router = modeling_nllb_moe.NllbMoeTop2Router(config).train()
    _, weight_TE = router.route_tokens(torch.zeros(num_tokens, num_experts))
    return int((weight_TE[:, 1] > 0).sum())  # ties go to the lower number: first 0, second 1


def nllb_model_loss(*, z_weight: float) -> float:
    """The training loss of a whole model with a weight for the router z-loss."""
    torch.manual_seed(0)
    config = NllbMoeConfig(
        vocab_size=17,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        num_experts=3,
        router_z_loss_coef=z_weight,
    )
    ids = torch.arange(3, 13).reshape(2, 5)
    model = NllbMoeForConditionalGeneration(config).eval()
    return model(input_ids=ids, labels=ids, output_router_logits=True).loss.item()


# Mixtral and Qwen


def mixtral(*, num_choices: int = 2, jitter: float = 0.0) -> Peer:
    """Mixtral's block."""
    config = MixtralConfig(
        hidden_size=D_MODEL,
        intermediate_size=D_HIDDEN,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=num_choices,
        router_jitter_noise=jitter,
    )
    return _top_k(modeling_mixtral.MixtralSparseMoeBlock(config))


def qwen2(*, num_choices: int = 3, norm_topk_prob: bool = False) -> Peer:
    """Qwen2-MoE's block, whose shared expert is wider than the routed ones."""
    config = Qwen2MoeConfig(
        hidden_size=D_MODEL,
        moe_intermediate_size=D_HIDDEN,
        shared_expert_intermediate_size=13,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=num_choices,
        norm_topk_prob=norm_topk_prob,
    )
    return _top_k(modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config))


def qwen3(*, num_choices: int = 3, norm_topk_prob: bool = True) -> Peer:
    """Qwen3-MoE's block."""
    config = Qwen3MoeConfig(
        hidden_size=D_MODEL,
        moe_intermediate_size=D_HIDDEN,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=num_choices,
        norm_topk_prob=norm_topk_prob,
    )
    return _top_k(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config))


def top_k_balance_loss(
    family: str, logits_of_layers: Sequence[np.ndarray], num_choices: int, mask_BL: np.ndarray
) -> float:
    """The balance loss of a model's layers; `logits_of_layers` are (tokens, experts)."""
    source = {
        "nllb-moe": modeling_nllb_moe,
        "mixtral": modeling_mixtral,
        "qwen2-moe": modeling_qwen2_moe,
        "qwen3-moe": modeling_qwen3_moe,
    }[family]
    logits = tuple(torch.tensor(logits_TE) for logits_TE in logits_of_layers)
    num_experts = logits[0].shape[-1]
    mask = torch.tensor(mask_BL, dtype=torch.float32)
    return source.load_balancing_loss_func(logits, num_experts, num_choices, mask).item()


def save_model(family: str, folder) -> tuple[Peer, dict]:
    """Writes a one-layer model as its users do; its sparse layer, and the configuration."""
    torch.manual_seed(0)
    # Multiples of 4: torch's grouped product, which whole models use, wants rows of 16 bytes.
    widths = {"moe_intermediate_size": 12, "num_experts": NUM_EXPERTS}
    model = {
        "mixtral": lambda: MixtralForCausalLM(
            MixtralConfig(**TINY_MODEL, intermediate_size=12, num_local_experts=NUM_EXPERTS)
        ),
        "qwen2-moe": lambda: Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**TINY_MODEL, **widths, shared_expert_intermediate_size=20)
        ),
        "qwen3-moe": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**TINY_MODEL, **widths, num_experts_per_tok=3, norm_topk_prob=True)
        ),
    }[family]()
    model.save_pretrained(folder)
    return _top_k(model.model.layers[0].mlp, random=False), model.config.to_dict()


def _top_k(module: torch.nn.Module, *, random: bool = True) -> Peer:
    module = _random(module) if random else module.eval()

    def weights(x_BLM):
        _, weight_TK, expert_TK = module.gate(x_BLM)
        weight_TE = torch.zeros(len(weight_TK), module.gate.num_experts)
        return weight_TE.scatter(1, expert_TK, weight_TK)

    return Peer(module, module, weights)


# All


def logits_TE(peer: Peer, x_BLM: np.ndarray) -> np.ndarray:
    """Router logits of the flat tokens."""
    x = torch.tensor(x_BLM)
    with torch.no_grad():
        router = getattr(peer.module, "router", None)
        logits = peer.module.gate(x)[0] if router is None else router.classifier(x)
    return logits.reshape(-1, logits.shape[-1]).numpy()


def input_after_training_step(peer: Peer, x_BLM: np.ndarray) -> np.ndarray:
    """The layer's input as the layer leaves it behind in training mode."""
    torch.manual_seed(0)
    x = torch.tensor(x_BLM)
    peer.module.train()
    with torch.no_grad():
        peer.module(x)
    return x.numpy()


def _random(module: torch.nn.Module) -> torch.nn.Module:
    """In evaluation mode, every weight drawn from a normal distribution of deviation 1/2."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module.parameters():
            value.normal_(0, 0.5, generator=generator)
    return module.eval()
