//! A model's shape, from its `config.json`, and the cost that follows.

use std::path::Path;

use plait_proto::Family;
use serde::{Deserialize, Serialize};

use crate::error::SimError;
use crate::files::{BuiltIn, describe};

const BUILT_IN: [BuiltIn; 4] = [
    ("qwen3-8b", include_str!("../data/models/qwen3-8b.json")),
    (
        "llama-3.1-70b",
        include_str!("../data/models/llama-3.1-70b.json"),
    ),
    (
        "deepseek-v2-lite",
        include_str!("../data/models/deepseek-v2-lite.json"),
    ),
    (
        "deepseek-v3",
        include_str!("../data/models/deepseek-v3.json"),
    ),
];

/// Larger numbers in a shape are mistakes. Their products must stay exact.
const MAX_NUMBER: u64 = 1 << 24;

/// The fields of a Hugging Face `config.json` that decide what a step computes and reads.
#[derive(Clone, Debug, Deserialize)]
pub struct ModelShape {
    #[serde(default)]
    architectures: Vec<String>,
    hidden_size: u64,
    num_hidden_layers: u64,
    num_attention_heads: u64,
    intermediate_size: u64,
    vocab_size: u64,
    max_position_embeddings: u64,
    #[serde(default)]
    tie_word_embeddings: bool,
    quantization_config: Option<Quantization>,
    #[serde(flatten)]
    gqa: GqaHeads,
    #[serde(flatten)]
    mla: MlaHeads,
    #[serde(flatten)]
    experts: Experts,
}

#[derive(Clone, Debug, Deserialize)]
struct Quantization {
    quant_method: String,
}

/// Grouped query attention.
#[derive(Clone, Debug, Deserialize)]
struct GqaHeads {
    num_key_value_heads: Option<u64>,
    head_dim: Option<u64>,
}

/// Multi-head latent attention.
#[derive(Clone, Debug, Deserialize)]
struct MlaHeads {
    kv_lora_rank: Option<u64>,
    q_lora_rank: Option<u64>,
    qk_nope_head_dim: Option<u64>,
    qk_rope_head_dim: Option<u64>,
    v_head_dim: Option<u64>,
}

/// Routed experts, if any.
#[derive(Clone, Debug, Deserialize)]
struct Experts {
    #[serde(alias = "num_experts", alias = "num_local_experts")]
    n_routed_experts: Option<u64>,
    num_experts_per_tok: Option<u64>,
    n_shared_experts: Option<u64>,
    moe_intermediate_size: Option<u64>,
    first_k_dense_replace: Option<u64>,
}

/// Size and cost of one layer's attention.
struct Attention {
    num_parameters: u64,
    num_cache_values: u64,
    prefill_flops_per_pair: u64,
    decode_flops_per_pair: u64,
}

/// What a step computes and reads per token, row and token pair, over all layers.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelCost {
    /// Parameters that every token is multiplied with, without experts and output head.
    pub dense_parameters: f64,
    /// Of the output head, which only sampled rows use.
    pub head_parameters: f64,
    /// Of the embedding, which is held in memory only.
    pub embedding_parameters: f64,
    /// Of one routed expert, over all layers that have experts.
    pub expert_parameters: f64,
    /// Routed experts of a layer, or 0.
    pub num_experts: f64,
    /// Routed experts that a token activates.
    pub num_experts_per_token: f64,
    /// Bytes of one parameter.
    pub weight_bytes: f64,
    /// Bytes of one token's KV, at 16 bits a value.
    pub kv_bytes_per_token: f64,
    /// Of one prefill token and one KV token that it attends to.
    pub prefill_flops_per_pair: f64,
    /// The same for a decode row. MLA absorbs the up-projection here.
    pub decode_flops_per_pair: f64,
    /// Layers.
    pub num_layers: f64,
    /// Values per token between layers.
    pub hidden_size: f64,
    /// Longest prompt plus output.
    pub max_model_len: u32,
}

/// Of a parameter in the worker's memory, which dequantises FP8 checkpoints.
const LOADED_WEIGHT_BYTES: f64 = 2.0;

/// What a server's batch sizes follow from. Whole model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelSize {
    /// Of all parameters in the worker's memory.
    pub weight_bytes: f64,
    /// Parameters that one token is multiplied with, the output head apart.
    pub parameters_per_token: f64,
    /// KV cache of one token, 16 bits a value.
    pub kv_bytes_per_token: f64,
    /// Elements of a token between layers.
    pub hidden_size: f64,
}

impl ModelSize {
    /// Of the `config.json` at this path.
    pub fn read(path: &str) -> Result<Self, SimError> {
        let model = ModelCost::named(path)?;
        Ok(Self {
            weight_bytes: model.num_parameters() * LOADED_WEIGHT_BYTES,
            parameters_per_token: model.parameters_per_token(),
            kv_bytes_per_token: model.kv_bytes_per_token,
            hidden_size: model.hidden_size,
        })
    }

    /// As `plait.batch_sizes.ModelSize` reads it.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers become JSON")
    }
}

impl ModelCost {
    /// A built-in shape, or the `config.json` at this path.
    pub fn named(name: &str) -> Result<Self, SimError> {
        let shape: ModelShape = describe("--model", name, &BUILT_IN)?;
        shape
            .check()
            .map_err(|problem| SimError::content(Path::new(name), problem))?;
        shape
            .cost()
            .map_err(|problem| SimError::content(Path::new(name), problem))
    }

    /// Parameters in memory.
    pub fn num_parameters(&self) -> f64 {
        self.parameters_of_replica(1)
    }

    /// Parameters in the memory of one of so many replicas that share the experts.
    pub fn parameters_of_replica(&self, num_sharing: u32) -> f64 {
        self.dense_parameters
            + self.head_parameters
            + self.embedding_parameters
            + self.expert_parameters * self.num_experts / f64::from(num_sharing)
    }

    /// Whether the weights are FP8.
    pub fn is_float8(&self) -> bool {
        self.weight_bytes < 2.0
    }

    /// Parameters that a step with so many tokens reads. Of the routed experts, it reads those that
    /// any token chose; each token chooses evenly and independently.
    pub fn parameters_read(&self, num_tokens: f64) -> f64 {
        if self.num_experts == 0.0 {
            return self.dense_parameters;
        }
        let missed_by_one = 1.0 - self.num_experts_per_token / self.num_experts;
        let num_met = self.num_experts * (1.0 - missed_by_one.powf(num_tokens));
        self.dense_parameters + self.expert_parameters * num_met
    }

    /// Parameters that one token is multiplied with, without the output head.
    pub fn parameters_per_token(&self) -> f64 {
        self.dense_parameters + self.expert_parameters * self.num_experts_per_token
    }
}

impl ModelShape {
    fn check(&self) -> Result<(), String> {
        let numbers = [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("num_key_value_heads", self.num_kv_heads()),
            ("head_dim", self.head_dim()),
            (
                "n_routed_experts",
                self.experts.n_routed_experts.unwrap_or(1),
            ),
        ];
        match numbers
            .iter()
            .find(|(_, number)| !(1..=MAX_NUMBER).contains(number))
        {
            Some((name, number)) => Err(format!("{name} is {number}; allowed: 1 to {MAX_NUMBER}")),
            None => Ok(()),
        }
    }

    fn cost(&self) -> Result<ModelCost, String> {
        let attention = self.attention()?;
        let layers = self.num_hidden_layers;
        let num_moe_layers = self.num_moe_layers();
        let dense_ffn = 3 * self.hidden_size * self.intermediate_size;
        let expert = 3 * self.hidden_size * self.expert_size()?;
        let shared = expert * self.experts.n_shared_experts.unwrap_or(0);
        let dense = layers * attention.num_parameters
            + (layers - num_moe_layers) * dense_ffn
            + num_moe_layers * shared;
        let embedding = self.vocab_size * self.hidden_size;
        Ok(ModelCost {
            dense_parameters: dense as f64,
            head_parameters: embedding as f64,
            embedding_parameters: if self.tie_word_embeddings {
                0.0
            } else {
                embedding as f64
            },
            expert_parameters: (num_moe_layers * expert) as f64,
            num_experts: self.experts.n_routed_experts.unwrap_or(0) as f64,
            num_experts_per_token: self.experts_per_token()?,
            weight_bytes: self.weight_bytes(),
            kv_bytes_per_token: (2 * layers * attention.num_cache_values) as f64,
            prefill_flops_per_pair: (layers * attention.prefill_flops_per_pair) as f64,
            decode_flops_per_pair: (layers * attention.decode_flops_per_pair) as f64,
            num_layers: layers as f64,
            hidden_size: self.hidden_size as f64,
            max_model_len: u32::try_from(self.max_position_embeddings).expect("checked"),
        })
    }

    fn num_kv_heads(&self) -> u64 {
        self.gqa
            .num_key_value_heads
            .unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> u64 {
        self.gqa
            .head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    fn weight_bytes(&self) -> f64 {
        match &self.quantization_config {
            Some(quantization) if quantization.quant_method == "fp8" => 1.0,
            _ => 2.0,
        }
    }

    fn attention(&self) -> Result<Attention, String> {
        if self.uses_mla() {
            self.mla()
        } else {
            Ok(self.gqa())
        }
    }

    /// As the family's layers do; a shape of no known family does if it states `kv_lora_rank`.
    fn uses_mla(&self) -> bool {
        let mut families = self
            .architectures
            .iter()
            .map(|name| Family::of_architecture(name));
        match families.find_map(Result::ok) {
            Some(family) => family.uses_mla(),
            None => self.mla.kv_lora_rank.is_some(),
        }
    }

    fn gqa(&self) -> Attention {
        let query = self.num_attention_heads * self.head_dim();
        let key = self.num_kv_heads() * self.head_dim();
        Attention {
            num_parameters: self.hidden_size * (2 * query + 2 * key),
            num_cache_values: 2 * key,
            prefill_flops_per_pair: 4 * query,
            decode_flops_per_pair: 4 * query,
        }
    }

    fn mla(&self) -> Result<Attention, String> {
        let mla = &self.mla;
        let kv_rank = require_number("kv_lora_rank", mla.kv_lora_rank)?;
        let content = require_number("qk_nope_head_dim", mla.qk_nope_head_dim)?;
        let rope = require_number("qk_rope_head_dim", mla.qk_rope_head_dim)?;
        let value = require_number("v_head_dim", mla.v_head_dim)?;
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        let query = heads * (content + rope);
        let to_query = match mla.q_lora_rank {
            Some(rank) => rank * (hidden + query),
            None => hidden * query,
        };
        let to_kv = hidden * (kv_rank + rope) + kv_rank * heads * (content + value);
        Ok(Attention {
            num_parameters: to_query + to_kv + heads * value * hidden,
            num_cache_values: kv_rank + rope,
            prefill_flops_per_pair: 2 * heads * (content + rope + value),
            decode_flops_per_pair: 2 * heads * (2 * kv_rank + rope),
        })
    }

    fn num_moe_layers(&self) -> u64 {
        let num_dense = self.experts.first_k_dense_replace.unwrap_or(0);
        match self.experts.n_routed_experts {
            Some(_) => self.num_hidden_layers.saturating_sub(num_dense),
            None => 0,
        }
    }

    /// Width of one routed expert; 0 without experts.
    fn expert_size(&self) -> Result<u64, String> {
        match self.experts.n_routed_experts {
            Some(_) => require_number("moe_intermediate_size", self.experts.moe_intermediate_size),
            None => Ok(0),
        }
    }

    fn experts_per_token(&self) -> Result<f64, String> {
        let Some(num_experts) = self.experts.n_routed_experts else {
            return Ok(0.0);
        };
        let num = require_number("num_experts_per_tok", self.experts.num_experts_per_tok)?;
        if num > num_experts {
            return Err(format!(
                "num_experts_per_tok is {num}; allowed: 1 to {num_experts}"
            ));
        }
        Ok(num as f64)
    }
}

fn require_number(name: &str, given: Option<u64>) -> Result<u64, String> {
    match given {
        Some(number) if (1..=MAX_NUMBER).contains(&number) => Ok(number),
        Some(number) => Err(format!("{name} is {number}; allowed: 1 to {MAX_NUMBER}")),
        None => Err(format!("{name} is missing; this kind of model has it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qwen3_8b_has_the_figures_that_are_known_of_it() {
        let model = ModelCost::named("qwen3-8b").unwrap();
        assert_eq!(model.kv_bytes_per_token, 147_456.0);
        assert!((6.94e9..6.96e9).contains(&model.parameters_per_token()));
        assert!((8.18e9..8.20e9).contains(&model.num_parameters()));
    }

    #[test]
    fn deepseek_v2_lite_meets_a_few_experts_and_reads_all_of_them_at_many_tokens() {
        let model = ModelCost::named("deepseek-v2-lite").unwrap();
        assert_eq!(model.kv_bytes_per_token, 31_104.0);
        assert!((2.2e9..2.3e9).contains(&model.parameters_per_token()));
        assert!((15.6e9..15.8e9).contains(&model.num_parameters()));
        let (one, many) = (model.parameters_read(1.0), model.parameters_read(10_000.0));
        assert!((one - model.parameters_per_token()).abs() < 1.0);
        assert!((many - model.dense_parameters - 64.0 * model.expert_parameters).abs() < 1.0);
    }

    #[test]
    fn deepseek_v3_has_671_billion_parameters_in_8_bits() {
        let model = ModelCost::named("deepseek-v3").unwrap();
        assert!((670e9..672e9).contains(&model.num_parameters()));
        assert!(model.is_float8());
    }
}
