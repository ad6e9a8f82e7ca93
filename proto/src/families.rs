//! The model families that are served: what the engine, the text and the simulator need to know of each.
//!
//! `plait_proto/families.json` is the one list; Python reads the same file. A list of `layers` shorter than the model
//! repeats.

use std::sync::LazyLock;

use serde::Deserialize;

const LIST: &str = include_str!("../plait_proto/families.json");

/// How a layer attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKind {
    /// Multi-head or grouped-query attention.
    Mha,
    /// Multi-head latent attention.
    Mla,
    /// DeepSeek-V4's: recent keys as they are, and compressed entries of what lies before them.
    Compressed,
}

/// What a layer caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheKind {
    /// Keys and values of every token.
    Full,
    /// Keys and values, of which no token sees those beyond a window, if the model's files state one.
    SlidingWindow,
    /// The compressed KV of every token.
    Mla,
    /// An entry for every so many tokens, or none, and a ring of recent keys for each slot.
    Compressed,
}

/// A layer's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerKind {
    /// How it attends.
    pub attention: AttentionKind,
    /// What it caches.
    pub cache: CacheKind,
}

/// One family of models.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Family {
    /// Ours.
    pub name: String,
    /// Its names in `architectures` of a config.json.
    pub architectures: Vec<String>,
    /// Its name in `general.architecture` of a GGUF; `None` if GGUF files of it are not supported.
    pub gguf: Option<String>,
    /// Kinds of the layers in order, repeated to the model's depth.
    pub layers: Vec<LayerKind>,
    /// Tokens of a page unless the user says otherwise; `None` for the usual number.
    pub page_size: Option<u32>,
    /// How its chat template writes tool calls; `None` if they are not parsed.
    pub tool_format: Option<String>,
    /// How it marks its reasoning; `None` if that is not parsed.
    pub reasoning_format: Option<String>,
}

impl Family {
    /// Every family, in the list's order.
    pub fn all() -> &'static [Family] {
        static ALL: LazyLock<Vec<Family>> = LazyLock::new(|| {
            serde_json::from_str(LIST).expect("families.json is a list of families")
        });
        &ALL
    }

    /// From `architectures` of a config.json; the error lists those that are supported.
    pub fn of_architecture(name: &str) -> Result<&'static Family, String> {
        find(name, |family| family.architectures.iter().collect())
    }

    /// From `general.architecture` of a GGUF; the error lists those that are supported.
    pub fn of_gguf(name: &str) -> Result<&'static Family, String> {
        find(name, |family| family.gguf.iter().collect())
    }

    /// Whether any layer is MLA.
    pub fn uses_mla(&self) -> bool {
        let mut layers = self.layers.iter();
        layers.any(|layer| layer.attention == AttentionKind::Mla)
    }
}

fn find(
    wanted: &str,
    names: impl Fn(&'static Family) -> Vec<&'static String>,
) -> Result<&'static Family, String> {
    let all = Family::all();
    let found = all
        .iter()
        .find(|family| names(family).iter().any(|name| *name == wanted));
    found.ok_or_else(|| {
        let supported: Vec<_> = all.iter().flat_map(&names).map(String::as_str).collect();
        let reason = if wanted.starts_with("DeepseekV41") {
            ": DeepSeek-V4.1 is another architecture than DeepSeek-V4"
        } else {
            ""
        };
        format!(
            "the architecture `{wanted}` is not served{reason}; these are: {}",
            supported.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_belongs_to_one_family_and_every_family_has_layers() {
        let mut names: Vec<_> = Family::all()
            .iter()
            .flat_map(|family| family.architectures.iter().chain([&family.name]))
            .collect();
        let num_names = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), num_names);
        assert!(Family::all().iter().all(|family| !family.layers.is_empty()));
    }

    #[test]
    fn a_family_is_found_by_the_names_that_files_give_it() {
        let family = Family::of_architecture("DeepseekV2ForCausalLM").expect("served");
        assert_eq!(
            (family.name.as_str(), family.uses_mla()),
            ("deepseek_v2", true)
        );
        let family = Family::of_gguf("qwen3moe").expect("served");
        assert_eq!(
            (family.name.as_str(), family.uses_mla()),
            ("qwen3_moe", false)
        );
    }

    #[test]
    fn the_next_version_of_a_family_is_refused_as_another_architecture() {
        let error = Family::of_architecture("DeepseekV41ForCausalLM").expect_err("V4.1");
        let said = "is not served: DeepSeek-V4.1 is another architecture than DeepSeek-V4; these";
        assert!(error.contains(said), "{error}");
    }

    #[test]
    fn an_unknown_architecture_is_answered_with_those_that_are_supported() {
        let error = Family::of_gguf("LlamaForCausalLM").expect_err("a folder's name");
        assert_eq!(
            error,
            "the architecture `LlamaForCausalLM` is not served; these are: llama, qwen2, qwen3, qwen3moe"
        );
    }
}
