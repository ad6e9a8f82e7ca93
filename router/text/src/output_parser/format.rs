//! How model families write thoughts and tool calls, as data.

use super::writing::{self, Writing};

/// The markers around a thought.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningFormat {
    /// What `--reasoning-parser` calls it; the first is ours.
    pub names: &'static [&'static str],
    /// Before a thought.
    pub open: &'static str,
    /// After a thought.
    pub close: &'static str,
}

/// How a family writes its tool calls.
#[derive(Debug, PartialEq, Eq)]
pub struct ToolFormat {
    /// What `--tool-parser` calls it; the first is ours.
    pub names: &'static [&'static str],
    /// A chat template that has all texts of one of these rows writes calls so.
    pub(super) signs: &'static [&'static [&'static str]],
    /// One comes before the first call of several.
    pub(super) begins: &'static [&'static str],
    /// Begins an answer that is a call without a marker.
    pub(super) bare: Option<u8>,
    /// Comes before each call.
    pub(super) call_begin: &'static str,
    /// May come before a call.
    pub(super) separators: &'static [&'static str],
    /// May come after a call.
    pub(super) ends: &'static [&'static str],
    pub(super) syntax: Syntax,
    /// What its own template makes of calls; of several the model has one.
    pub writings: &'static [Writing],
    /// How calls are named where the model gives no id.
    pub ids: CallIds,
}

/// Ids of calls, as the family's template wants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallIds {
    /// `call_` and 24 hexadecimal digits.
    Usual,
    /// 9 letters and digits; Mistral's templates refuse others.
    NineLetters,
}

/// What is between a call's beginning and its end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Syntax {
    /// `{"name": "f", "arguments": {...}}`.
    Object,
    /// A name, a marker, JSON.
    Named(Named),
    /// Either of the two: Mistral's older and newer models.
    ObjectOrNamed(Named),
    /// A name, then marked pairs of names and texts.
    Tagged(Tagged),
    /// `f(a=1, b="x")`.
    Python,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    /// Before the name.
    pub(super) prefix: &'static str,
    /// After the name.
    pub(super) name_end: &'static str,
    pub(super) name: NameStyle,
}

/// What stands where a name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameStyle {
    Plain,
    /// `functions.f:0`, which is the call's id too.
    FunctionsIndex,
    /// `f`, or `f[CALL_ID]123456789`.
    CallId,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Tagged {
    pub(super) name_end: &'static str,
    pub(super) key_begin: &'static str,
    pub(super) key_end: &'static str,
    /// Between a key and its value, with white space around.
    pub(super) value_begin: &'static str,
    pub(super) value_end: &'static str,
    /// Lines of its own: a value has a line break on both sides that is not part of it.
    pub(super) is_padded: bool,
    pub(super) call_end: &'static str,
}

static REASONING_FORMATS: [ReasoningFormat; 2] = [
    ReasoningFormat {
        names: &[
            "qwen3",
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v31",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "holo2",
            "step3",
        ],
        open: "<think>",
        close: "</think>",
    },
    ReasoningFormat {
        names: &["mistral"],
        open: "[THINK]",
        close: "[/THINK]",
    },
];

/// The more particular sign first.
static TOOL_FORMATS: [ToolFormat; 10] = [
    ToolFormat {
        names: &["minimax_m2", "minimax-m2"],
        signs: &[&["<minimax:tool_call>"]],
        begins: &["<minimax:tool_call>"],
        bare: None,
        call_begin: "<invoke name=\"",
        separators: &[],
        ends: &["</minimax:tool_call>"],
        syntax: Syntax::Tagged(Tagged {
            name_end: "\">",
            key_begin: "<parameter name=\"",
            key_end: "\">",
            value_begin: "",
            value_end: "</parameter>",
            is_padded: false,
            call_end: "</invoke>",
        }),
        writings: &writing::MINIMAX_M2,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["kimi_k2"],
        signs: &[&["<|tool_calls_section_begin|>"]],
        begins: &["<|tool_calls_section_begin|>"],
        bare: None,
        call_begin: "<|tool_call_begin|>",
        separators: &[],
        ends: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        syntax: Syntax::Named(Named {
            prefix: "",
            name_end: "<|tool_call_argument_begin|>",
            name: NameStyle::FunctionsIndex,
        }),
        writings: &writing::KIMI_K2,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["deepseek_v3", "deepseek_r1", "deepseekv3"],
        signs: &[&["<｜tool▁calls▁begin｜>", "```json"]],
        begins: &["<｜tool▁calls▁begin｜>"],
        bare: None,
        call_begin: "<｜tool▁call▁begin｜>",
        separators: &[],
        ends: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        syntax: Syntax::Named(Named {
            prefix: "function<｜tool▁sep｜>",
            name_end: "```json",
            name: NameStyle::Plain,
        }),
        writings: &writing::DEEPSEEK_V3,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["deepseek_v31", "deepseekv31"],
        signs: &[&["<｜tool▁calls▁begin｜>"]],
        begins: &["<｜tool▁calls▁begin｜>"],
        bare: None,
        call_begin: "<｜tool▁call▁begin｜>",
        separators: &[],
        ends: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        syntax: Syntax::Named(Named {
            prefix: "",
            name_end: "<｜tool▁sep｜>",
            name: NameStyle::Plain,
        }),
        writings: &writing::DEEPSEEK_V31,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["mistral"],
        signs: &[&["[TOOL_CALLS]"]],
        begins: &["[TOOL_CALLS]"],
        bare: None,
        call_begin: "",
        separators: &["[", ","],
        ends: &["]"],
        syntax: Syntax::ObjectOrNamed(Named {
            prefix: "",
            name_end: "[ARGS]",
            name: NameStyle::CallId,
        }),
        writings: &writing::MISTRAL,
        ids: CallIds::NineLetters,
    },
    ToolFormat {
        names: &["glm45", "glm47"],
        signs: &[&["<arg_key>"]],
        begins: &["<tool_call>"],
        bare: None,
        call_begin: "",
        separators: &[],
        ends: &[],
        syntax: Syntax::Tagged(Tagged {
            name_end: "\n",
            key_begin: "<arg_key>",
            key_end: "</arg_key>",
            value_begin: "<arg_value>",
            value_end: "</arg_value>",
            is_padded: false,
            call_end: "</tool_call>",
        }),
        writings: &writing::GLM45,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["qwen3_coder", "qwen3_xml"],
        signs: &[&["<function=", "<parameter="]],
        begins: &["<tool_call>"],
        bare: None,
        call_begin: "<function=",
        separators: &[],
        ends: &["</tool_call>"],
        syntax: Syntax::Tagged(Tagged {
            name_end: ">",
            key_begin: "<parameter=",
            key_end: ">",
            value_begin: "",
            value_end: "</parameter>",
            is_padded: true,
            call_end: "</function>",
        }),
        writings: &writing::QWEN3_CODER,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["hermes", "qwen25", "qwen"],
        signs: &[&["<tool_call>"]],
        begins: &["<tool_call>"],
        bare: None,
        call_begin: "",
        separators: &[],
        ends: &["</tool_call>"],
        syntax: Syntax::Object,
        writings: &writing::HERMES,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["pythonic", "llama4_pythonic"],
        signs: &[&["<|python_start|>"], &["[func_name1("]],
        begins: &["<|python_start|>"],
        bare: Some(b'['),
        call_begin: "",
        separators: &["[", ","],
        ends: &["]", "<|python_end|>"],
        syntax: Syntax::Python,
        writings: &writing::PYTHONIC,
        ids: CallIds::Usual,
    },
    ToolFormat {
        names: &["llama3_json", "llama3", "llama4_json"],
        signs: &[
            &["<|python_tag|>"],
            &["dictionary of argument name and its value"],
        ],
        begins: &["<|python_tag|>"],
        bare: Some(b'{'),
        call_begin: "",
        separators: &[";"],
        ends: &[],
        syntax: Syntax::Object,
        writings: &writing::LLAMA3_JSON,
        ids: CallIds::Usual,
    },
];

impl ReasoningFormat {
    /// Every format.
    pub fn all() -> &'static [Self] {
        &REASONING_FORMATS
    }

    /// The format of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        REASONING_FORMATS
            .iter()
            .find(|format| format.names.contains(&name))
    }

    /// The format that a chat template's text shows.
    pub fn of_template(source: &str) -> Option<&'static Self> {
        let shows = |format: &&Self| source.contains(format.open) || source.contains(format.close);
        REASONING_FORMATS.iter().find(shows)
    }
}

impl ToolFormat {
    /// Every format.
    pub fn all() -> &'static [Self] {
        &TOOL_FORMATS
    }

    /// The format of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TOOL_FORMATS
            .iter()
            .find(|format| format.names.contains(&name))
    }

    /// The format that a chat template's text shows.
    pub fn of_template(source: &str) -> Option<&'static Self> {
        let shows = |signs: &&[&str]| signs.iter().all(|sign| source.contains(sign));
        TOOL_FORMATS
            .iter()
            .find(|format| format.signs.iter().any(shows))
    }

    /// The byte with which an answer begins that is a call without a marker.
    pub fn bare(&self) -> Option<u8> {
        self.bare
    }

    /// Markers with which a call may begin within a text.
    pub fn markers_in_text(&self) -> impl Iterator<Item = &'static str> {
        let call = Some(self.call_begin).filter(|marker| !marker.is_empty());
        self.begins.iter().copied().chain(call)
    }

    /// Every marker, for special tokens that are part of one.
    pub(super) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let own: [&'static str; 6] = match &self.syntax {
            Syntax::Object | Syntax::Python => [""; 6],
            Syntax::Named(named) | Syntax::ObjectOrNamed(named) => {
                [named.prefix, named.name_end, "[CALL_ID]", "", "", ""]
            }
            Syntax::Tagged(tags) => [
                tags.key_begin,
                tags.key_end,
                tags.value_begin,
                tags.value_end,
                tags.call_end,
                tags.name_end,
            ],
        };
        self.markers_in_text()
            .chain(self.ends.iter().copied())
            .chain(own)
    }
}
