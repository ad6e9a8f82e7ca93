//! The model families that the worker computes, by the names that files give them.

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    Llama,
    Qwen3,
    Qwen3Moe,
}

/// What each family is called: by us, in a config.json, in a GGUF.
const NAMES: [(Architecture, &str, &str, &str); 3] = [
    (Architecture::Llama, "llama", "LlamaForCausalLM", "llama"),
    (Architecture::Qwen3, "qwen3", "Qwen3ForCausalLM", "qwen3"),
    (
        Architecture::Qwen3Moe,
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3moe",
    ),
];

impl Architecture {
    /// The name in `describe()`.
    pub(super) fn name(self) -> &'static str {
        NAMES
            .iter()
            .find(|names| names.0 == self)
            .expect("every family has its row")
            .1
    }

    /// From `architectures` of a config.json.
    pub(super) fn from_class(class: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|names| names.2 == class);
        found.map(|names| names.0).ok_or_else(|| {
            let served = NAMES.map(|names| names.2).join(", ");
            format!("the architecture `{class}` is not served; these are: {served}")
        })
    }

    /// From `general.architecture` of a GGUF.
    pub(super) fn from_gguf(name: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|names| names.3 == name);
        found.map(|names| names.0).ok_or_else(|| {
            let served = NAMES.map(|names| names.3).join(", ");
            format!("the architecture `{name}` is not served; these are: {served}")
        })
    }
}
