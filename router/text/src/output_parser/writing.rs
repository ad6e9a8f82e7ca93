//! How families' own templates write calls, for answers that must be some.

/// One way of writing calls: `begin`, calls with `separator` between them, `end`.
#[derive(Debug, PartialEq, Eq)]
pub struct Writing {
    /// Before the first call.
    pub begin: &'static str,
    /// Before a call's name.
    pub call_begin: &'static str,
    /// Between the name and the arguments.
    pub name_end: &'static [NameEnd],
    /// The arguments.
    pub arguments: ArgumentsWriting,
    /// After a call's arguments.
    pub call_end: &'static str,
    /// Between two calls.
    pub separator: &'static str,
    /// After the last call.
    pub end: &'static str,
}

/// A part of what follows a name.
#[derive(Debug, PartialEq, Eq)]
pub enum NameEnd {
    /// This text.
    Text(&'static str),
    /// What this regular expression matches.
    Regex(&'static str),
}

/// How arguments are written.
#[derive(Debug, PartialEq, Eq)]
pub enum ArgumentsWriting {
    /// As a JSON object.
    Json,
    /// As `a=1, b="x"`.
    Python,
    /// As names and texts between marks.
    Tagged(TaggedWriting),
}

/// An argument: `key_begin` name `key_end` value `value_end` `pair_end`.
#[derive(Debug, PartialEq, Eq)]
pub struct TaggedWriting {
    /// Before the name.
    pub key_begin: &'static str,
    /// Between name and value.
    pub key_end: &'static str,
    /// Marks a value's end.
    pub value_end: &'static str,
    /// Behind that.
    pub pair_end: &'static str,
    /// What a reader takes for the value's end, as a regular expression: no value has it.
    pub misread: &'static str,
}

const JSON: ArgumentsWriting = ArgumentsWriting::Json;

/// A JSON object with name and arguments.
const fn object(
    (begin, call_begin): (&'static str, &'static str),
    name_end: &'static [NameEnd],
    (call_end, separator, end): (&'static str, &'static str, &'static str),
) -> Writing {
    Writing {
        begin,
        call_begin,
        name_end,
        arguments: JSON,
        call_end,
        separator,
        end,
    }
}

pub(super) static MINIMAX_M2: [Writing; 1] = [Writing {
    begin: "<minimax:tool_call>\n",
    call_begin: "<invoke name=\"",
    name_end: &[NameEnd::Text("\">\n")],
    arguments: ArgumentsWriting::Tagged(TaggedWriting {
        key_begin: "<parameter name=\"",
        key_end: "\">",
        value_end: "</parameter>",
        pair_end: "\n",
        misread: "",
    }),
    call_end: "</invoke>\n",
    separator: "",
    end: "</minimax:tool_call>",
}];

pub(super) static KIMI_K2: [Writing; 1] = [object(
    (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
    ),
    &[
        NameEnd::Text(":"),
        NameEnd::Regex("[0-9]{1,4}"),
        NameEnd::Text("<|tool_call_argument_begin|>"),
    ],
    ("<|tool_call_end|>", "", "<|tool_calls_section_end|>"),
)];

pub(super) static DEEPSEEK_V3: [Writing; 1] = [object(
    (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    ),
    &[NameEnd::Text("\n```json\n")],
    ("\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>"),
)];

pub(super) static DEEPSEEK_V31: [Writing; 1] = [object(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    &[NameEnd::Text("<｜tool▁sep｜>")],
    ("<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>"),
)];

/// The older models' and the newer ones', with ids and without.
pub(super) static MISTRAL: [Writing; 3] = [
    object(
        ("[TOOL_CALLS] [", "{\"name\": \""),
        &[NameEnd::Text("\", \"arguments\": ")],
        ("}", ", ", "]"),
    ),
    object(
        ("", "[TOOL_CALLS]"),
        &[
            NameEnd::Text("[CALL_ID]"),
            NameEnd::Regex("[a-zA-Z0-9]{9}"),
            NameEnd::Text("[ARGS]"),
        ],
        ("", "", ""),
    ),
    object(
        ("", "[TOOL_CALLS]"),
        &[NameEnd::Text("[ARGS]")],
        ("", "", ""),
    ),
];

pub(super) static GLM45: [Writing; 1] = [Writing {
    begin: "",
    call_begin: "<tool_call>",
    name_end: &[NameEnd::Text("\n")],
    arguments: ArgumentsWriting::Tagged(TaggedWriting {
        key_begin: "<arg_key>",
        key_end: "</arg_key>\n<arg_value>",
        value_end: "</arg_value>",
        pair_end: "\n",
        misread: "",
    }),
    call_end: "</tool_call>",
    separator: "\n",
    end: "",
}];

pub(super) static QWEN3_CODER: [Writing; 1] = [Writing {
    begin: "",
    call_begin: "<tool_call>\n<function=",
    name_end: &[NameEnd::Text(">\n")],
    arguments: ArgumentsWriting::Tagged(TaggedWriting {
        key_begin: "<parameter=",
        key_end: ">\n",
        value_end: "\n</parameter>",
        pair_end: "\n",
        misread: r"(.|\n)*</parameter>[ \n\r\t]*(<parameter=|</function>)(.|\n)*",
    }),
    call_end: "</function>\n</tool_call>",
    separator: "\n",
    end: "",
}];

pub(super) static HERMES: [Writing; 1] = [object(
    ("", "<tool_call>\n{\"name\": \""),
    &[NameEnd::Text("\", \"arguments\": ")],
    ("}\n</tool_call>", "\n", ""),
)];

pub(super) static PYTHONIC: [Writing; 1] = [Writing {
    begin: "[",
    call_begin: "",
    name_end: &[NameEnd::Text("(")],
    arguments: ArgumentsWriting::Python,
    call_end: ")",
    separator: ", ",
    end: "]",
}];

pub(super) static LLAMA3_JSON: [Writing; 1] = [object(
    ("", "{\"name\": \""),
    &[NameEnd::Text("\", \"parameters\": ")],
    ("}", "; ", ""),
)];
