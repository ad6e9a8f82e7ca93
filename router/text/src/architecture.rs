//! The model families that the worker computes, by the names that files give them.

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    DeepseekV2,
    DeepseekV3,
    MiniMaxM2,
}

/// What a family is called.
struct Names {
    family: Architecture,
    /// By us.
    own: &'static str,
    /// In a config.json.
    class: &'static str,
    /// In a GGUF; `None` where only folders of it are served.
    gguf: Option<&'static str>,
}

const fn named(
    family: Architecture,
    own: &'static str,
    class: &'static str,
    gguf: Option<&'static str>,
) -> Names {
    Names {
        family,
        own,
        class,
        gguf,
    }
}

const NAMES: [Names; 7] = [
    named(
        Architecture::Llama,
        "llama",
        "LlamaForCausalLM",
        Some("llama"),
    ),
    named(
        Architecture::Qwen2,
        "qwen2",
        "Qwen2ForCausalLM",
        Some("qwen2"),
    ),
    named(
        Architecture::Qwen3,
        "qwen3",
        "Qwen3ForCausalLM",
        Some("qwen3"),
    ),
    named(
        Architecture::Qwen3Moe,
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        Some("qwen3moe"),
    ),
    named(
        Architecture::DeepseekV2,
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        None,
    ),
    named(
        Architecture::DeepseekV3,
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        None,
    ),
    named(
        Architecture::MiniMaxM2,
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        None,
    ),
];

impl Architecture {
    /// The name in `describe()`.
    pub(crate) fn name(self) -> &'static str {
        NAMES
            .iter()
            .find(|names| names.family == self)
            .expect("every family has its row")
            .own
    }

    /// From `architectures` of a config.json.
    pub(crate) fn from_class(class: &str) -> Result<Self, String> {
        find(class, |names| Some(names.class))
    }

    /// From `general.architecture` of a GGUF.
    pub(crate) fn from_gguf(name: &str) -> Result<Self, String> {
        find(name, |names| names.gguf)
    }
}

/// The family of this name in one kind of file; the error lists those that are served from it.
fn find(
    wanted: &str,
    name_of: impl Fn(&Names) -> Option<&'static str>,
) -> Result<Architecture, String> {
    let found = NAMES.iter().find(|names| name_of(names) == Some(wanted));
    found.map(|names| names.family).ok_or_else(|| {
        let served: Vec<_> = NAMES.iter().filter_map(name_of).collect();
        format!(
            "the architecture `{wanted}` is not served; these are: {}",
            served.join(", ")
        )
    })
}
