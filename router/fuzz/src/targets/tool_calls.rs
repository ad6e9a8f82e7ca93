//! What a model writes: thoughts, tool calls and text, in pieces of any length.

use std::sync::Arc;

use plait_text::{OutputParser, Parsed, Parsing, ReasoningFormat, ToolFormat, Tools};
use serde_json::json;

use super::Target;

const MARKERS: &[&[u8]] = &[
    b"<tool_call>", b"</tool_call>", b"<think>", b"</think>", b"<function=get>", b"</function>", b"<parameter=a>",
    b"</parameter>", b"[TOOL_CALLS]", b"[ARGS]", b"{\"name\": \"get\", \"arguments\": ", b"{\"a\": ", b"get(a=", b"get",
    b"<arg_key>", b"</arg_key>", b"<arg_value>", b"</arg_value>", b"<invoke name=\"get\">", b"</invoke>",
    b"<parameter name=\"a\">", b"<minimax:tool_call>", b"</minimax:tool_call>", b"<|tool_calls_section_begin|>",
    b"<|tool_call_begin|>", b"functions.get:0", b"<|tool_call_argument_begin|>", b"<|python_tag|>", b"```json", b"```",
    b"\\u", b"\\", b"\"", b"'", b"[", b"]", b"{", b"}", b"(", b")", b",", b":", b"=", b"None", b"True", b"1e5", b"-",
    "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>".as_bytes(),
    "<\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>function<\u{ff5c}tool\u{2581}sep\u{ff5c}>get\n```json\n".as_bytes(),
    "<\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}>".as_bytes(),
];

pub fn output() -> Target {
    Target {
        name: "output",
        words: MARKERS,
        max_mib: 16,
        num_reduced: 200,
        decode: parse,
    }
}

/// The first bytes of an input say which format it is in, whether it begins in a thought, and how long its pieces are.
fn parse(input: &[u8]) -> bool {
    let Some(([tools, thoughts, piece_bytes], text)) =
        input.split_first_chunk::<3>().map(|(a, b)| (*a, b))
    else {
        return false;
    };
    let text = String::from_utf8_lossy(text);
    let whole = parsed(tools, thoughts, &text, usize::MAX);
    assert_eq!(
        whole,
        parsed(tools, thoughts, &text, usize::from(piece_bytes).max(1))
    );
    true
}

/// What all pieces together are; the same whatever their lengths.
fn parsed(tools: u8, thoughts: u8, text: &str, piece_bytes: usize) -> Whole {
    let mut parser = OutputParser::new(parsing(tools, thoughts));
    let mut whole = Whole::default();
    let mut rest = text;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(boundary(rest, piece_bytes));
        parser.push(piece, &mut |it| whole.add(&it));
        rest = after;
    }
    parser.finish(&mut |it| whole.add(&it));
    whole
}

fn boundary(text: &str, num_bytes: usize) -> usize {
    (num_bytes.min(text.len())..=text.len())
        .find(|at| text.is_char_boundary(*at))
        .expect("the end is one")
}

fn parsing(tools: u8, thoughts: u8) -> Parsing {
    let (formats, reasoning) = (ToolFormat::all(), ReasoningFormat::all());
    let parameters = json!({"type": "object", "properties": {
        "a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": ["array", "null"]},
        "d": {"anyOf": [{"$ref": "#/properties/d"}, {"type": "object"}]},
    }});
    let declared = Tools::new([
        ("get".to_owned(), parameters),
        ("set".to_owned(), json!(null)),
    ]);
    Parsing {
        reasoning: reasoning.get(usize::from(thoughts >> 1) % (reasoning.len() + 1)),
        starts_in_thought: thoughts & 1 == 1,
        tools: formats
            .get(usize::from(tools) % (formats.len() + 1))
            .map(|format| (format, Arc::new(declared))),
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Whole {
    text: String,
    thought: String,
    /// Names and arguments, and how they ended.
    calls: String,
}

impl Whole {
    fn add(&mut self, part: &Parsed<'_>) {
        match part {
            Parsed::Text(text) => self.text.push_str(text),
            Parsed::Thought(text) => self.thought.push_str(text),
            Parsed::Arguments(text) => self.calls.push_str(text),
            other => self.calls.push_str(&format!("{other:?}")),
        }
    }
}
