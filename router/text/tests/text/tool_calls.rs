//! What a family's template writes, its parser reads.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use plait_text::{
    Chat, ModelText, OutputParser, Parsed, Parsing, TextStart, TextStyle, ToolFormat, Tools,
};
use serde_json::{Map, Value, json};

use crate::generated_calls::{Draw, tools};
use crate::model_folder::{Folder, byte_level};

const FAMILIES: [&str; 11] = [
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "deepseek_v3",
    "deepseek_v31",
    "minimax_m2",
    "mistral",
    "mistral_named",
    "glm45",
    "kimi_k2",
];

/// Generated answers of each family: `PLAIT_CASES=2000` makes as many as were promised.
fn num_answers() -> usize {
    let asked = std::env::var("PLAIT_CASES").ok();
    asked.map_or(300, |asked| asked.parse().expect("PLAIT_CASES is a number"))
}

/// An answer put together from its pieces.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    text: String,
    thought: String,
    calls: Vec<Call>,
    num_no_calls: usize,
}

#[derive(Debug, Default, PartialEq)]
struct Call {
    name: String,
    id: Option<String>,
    arguments: String,
    has_ended: bool,
}

impl Answer {
    fn take(&mut self, parsed: Parsed<'_>) {
        match parsed {
            Parsed::Text(piece) => self.text.push_str(piece),
            Parsed::Thought(piece) => self.thought.push_str(piece),
            Parsed::CallBegun { name, id } => self.calls.push(Call {
                name: name.to_owned(),
                id: id.map(str::to_owned),
                ..Call::default()
            }),
            Parsed::Arguments(piece) => self.calls.last_mut().unwrap().arguments.push_str(piece),
            Parsed::CallEnded => self.calls.last_mut().unwrap().has_ended = true,
            Parsed::CallCutOff => assert!(!self.calls.last().unwrap().has_ended),
            Parsed::NoCall => self.num_no_calls += 1,
        }
    }

    fn calls(&self) -> Vec<(&str, Value)> {
        let calls = self.calls.iter().map(|call| {
            assert!(call.has_ended);
            let arguments = serde_json::from_str(&call.arguments);
            (call.name.as_str(), arguments.expect(&call.arguments))
        });
        calls.collect()
    }
}

fn declared(tools: &[Value]) -> Arc<Tools> {
    let declared = tools.iter().map(|tool| {
        let function = &tool["function"];
        (
            function["name"].as_str().unwrap().to_owned(),
            function["parameters"].clone(),
        )
    });
    Arc::new(Tools::new(declared))
}

fn parsing(format: &'static ToolFormat) -> Parsing {
    Parsing {
        tools: Some((format, declared(&tools()))),
        ..Parsing::default()
    }
}

fn parse<'a>(parsing: &Parsing, pieces: impl IntoIterator<Item = &'a str>) -> Answer {
    let mut parser = OutputParser::new(parsing.clone());
    let mut answer = Answer::default();
    for piece in pieces {
        parser.push(piece, &mut |parsed| answer.take(parsed));
    }
    parser.finish(&mut |parsed| answer.take(parsed));
    answer
}

fn named(name: &str) -> Parsing {
    parsing(ToolFormat::named(name).unwrap())
}

/// A text in pieces of one character each.
fn characters(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(|_: char| true)
}

/// A text in pieces of random sizes.
fn cut<'a>(text: &'a str, draw: &mut Draw) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let middle = rest.ceil_char_boundary(1 + draw.below(12).min(rest.len() - 1));
        let (piece, after) = rest.split_at(middle);
        pieces.push(piece);
        rest = after;
    }
    pieces
}

/// A family's model: a byte-level tokenizer and the family's template.
struct Family {
    model: ModelText,
    parsing: Parsing,
}

impl Family {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tools");
        let template = fs::read_to_string(path.join(format!("{name}.jinja"))).unwrap();
        let folder = Folder::new(&byte_level());
        folder.write("chat_template.jinja", &template);
        let model = folder.load();
        let format = model
            .formats()
            .tools
            .expect("the template shows its family");
        let own = name.strip_suffix("_named").unwrap_or(name);
        assert_eq!(format, ToolFormat::named(own).unwrap());
        Self {
            parsing: parsing(format),
            model,
        }
    }

    /// What the model would have written, to be seen in history.
    fn write(&self, content: &str, calls: &[(&str, Value)]) -> String {
        let call = |(index, (name, arguments)): (usize, &(&str, Value))| {
            json!({"type": "function", "id": format!("functions.{name}:{index}"),
                   "function": {"name": name, "arguments": arguments.to_string()}})
        };
        let calls: Vec<Value> = calls.iter().enumerate().map(call).collect();
        let messages = json!([
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": content, "tool_calls": calls},
        ]);
        let messages: Vec<Map<String, Value>> = serde_json::from_value(messages).unwrap();
        let chat = Chat {
            messages: &messages,
            tools: &tools(),
            documents: &[],
            kwargs: &Map::new(),
            add_generation_prompt: false,
            continue_final_message: false,
            reasoning_effort: None,
        };
        let text = self.model.render(chat, 1 << 20).unwrap();
        let (_, text) = text.split_once("<|assistant|>").unwrap();
        text.strip_suffix("<|end|>").unwrap().to_owned()
    }
}

fn assert_reads_back(name: &str) {
    let family = Family::new(name);
    let mut draw = Draw::new(25);
    for round in 0..num_answers() {
        let calls = draw.calls();
        let content = ["", "Let me see."]
            [usize::from(round % 4 == 3 && !["llama3_json", "pythonic"].contains(&name))];
        let text = family.write(content, &calls);
        let whole = parse(&family.parsing, [text.as_str()]);
        assert_eq!(whole.calls(), calls, "{text}");
        assert_eq!(
            (whole.text.as_str(), whole.num_no_calls),
            (content, 0),
            "{text}"
        );
        assert_eq!(
            parse(&family.parsing, cut(&text, &mut draw)),
            whole,
            "{text}"
        );
        if round % 10 == 0 {
            assert_eq!(parse(&family.parsing, characters(&text)), whole, "{text}");
        }
        if round % 200 == 0 {
            let cuts = text.char_indices().map(|(at, _)| text.split_at(at));
            for (before, after) in cuts {
                assert_eq!(
                    parse(&family.parsing, [before, after]),
                    whole,
                    "{before}|{after}"
                );
            }
        }
        if round % 50 == 0 {
            assert_eq!(by_tokens(&family, &text), whole, "{text}");
        }
    }
}

/// The answer from the text's tokens, of which most are single bytes.
fn by_tokens(family: &Family, text: &str) -> Answer {
    let model = &family.model;
    let mut output = model.output_text(TextStyle::plain(TextStart::Fresh), family.parsing.clone());
    let mut answer = Answer::default();
    for token in model.encode(text, false, usize::MAX).unwrap() {
        let stop = output.push(model.vocabulary(), &[], token, &mut |parsed| {
            answer.take(parsed);
        });
        assert_eq!(stop, None);
    }
    let _ = output.finish(model.vocabulary(), &[], &mut |parsed| answer.take(parsed));
    answer
}

macro_rules! families_read_back {
    ($($name:ident)*) => {
        mod what_a_template_writes_is_read_back {
            $(#[test] fn $name() { super::assert_reads_back(stringify!($name)); })*

            #[test]
            fn of_all_families() {
                assert_eq!([$(stringify!($name)),*], super::FAMILIES);
            }
        }
    };
}

families_read_back!(
    hermes qwen3_coder llama3_json pythonic deepseek_v3 deepseek_v31 minimax_m2 mistral mistral_named glm45 kimi_k2
);

#[test]
fn an_answer_that_is_cut_anywhere_loses_no_character_and_keeps_the_same_calls() {
    for name in FAMILIES {
        let family = Family::new(name);
        let calls = [
            ("write_file", json!({"text": "a \"b\"\n", "flag": true})),
            ("now", json!({})),
        ];
        let text = family.write("", &calls);
        let whole = parse(&family.parsing, [text.as_str()]);
        for (at, _) in text.char_indices() {
            let cut = parse(&family.parsing, [&text[..at]]);
            assert_eq!(
                parse(&family.parsing, characters(&text[..at])),
                cut,
                "{name}: {}",
                &text[..at]
            );
            for (part, all) in cut.calls.iter().zip(&whole.calls) {
                assert_eq!(part.name, all.name);
                assert!(
                    all.arguments.starts_with(&part.arguments) || !part.has_ended,
                    "{name}: {part:?}"
                );
            }
            if cut.calls.is_empty() {
                assert_eq!(cut.text.trim(), text[..at].trim(), "{name}");
            }
        }
    }
}

#[test]
fn a_call_of_an_undeclared_tool_is_text_byte_for_byte() {
    for name in FAMILIES {
        let family = Family::new(name);
        let text = family.write("", &[("unknown_tool", json!({"text": "x\ny"}))]);
        for pieces in [vec![text.as_str()], characters(&text).collect()] {
            let answer = parse(&family.parsing, pieces);
            assert_eq!(answer.text.trim(), text.trim(), "{name}");
            assert_eq!(answer.calls, []);
        }
    }
}

#[test]
fn texts_between_and_behind_calls_are_kept() {
    let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let answer = parse(
        &named("hermes"),
        [format!("One. {call}\n\nTwo. {call} Three.\n").as_str()],
    );
    assert_eq!(answer.text, "One.Two.Three.\n");
    assert_eq!(answer.calls(), [("now", json!({})), ("now", json!({}))]);
}

#[test]
fn what_only_looks_like_a_call_is_text() {
    for (family, text) in [
        ("hermes", "Write <tool_call> and </tool_call> around it."),
        ("hermes", "<tool_call>{\"name\": 3}</tool_call>"),
        ("hermes", "<tool_call>"),
        ("llama3_json", "{\"city\": \"Rome\", \"name\": \"now\"}"),
        ("llama3_json", "{\"name\": \"Rome\"}"),
        ("llama3_json", "Use {\"name\": \"now\", \"parameters\": {}}"),
        ("pythonic", "[1] says now() is a call; [2] does not."),
        ("mistral", "See [TOOL_CALLS]."),
        ("qwen3_coder", "if a <function=b or c"),
        ("kimi_k2", "<|tool_calls_section_begin|> is a marker"),
    ] {
        for pieces in [vec![text], characters(text).collect()] {
            let answer = parse(&named(family), pieces);
            assert_eq!(
                (answer.text.as_str(), answer.calls.len()),
                (text, 0),
                "{family}"
            );
        }
    }
}

#[test]
fn the_call_behind_a_broken_one_is_found() {
    let text = "<tool_call>{oops <tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    let answer = parse(&named("hermes"), [text]);
    assert_eq!(answer.text, "<tool_call>{oops");
    assert_eq!(answer.calls(), [("now", json!({}))]);
}

#[test]
fn arguments_come_in_any_order_and_as_a_text_of_json() {
    for object in [
        r#"{"arguments": {"text": "a"}, "name": "write_file"}"#,
        r#"{"id": "x", "name": "write_file", "arguments": "{\"text\": \"\u0061\"}"}"#,
        r#"{"arguments": "{\"text\": \"a\"}", "name": "write_file"}"#,
        r#"{"name": "write_file", "parameters": {"text": "a"}"#,
    ] {
        for pieces in [vec![object], characters(object).collect()] {
            let pieces = std::iter::once("<tool_call>").chain(pieces);
            let answer = parse(&named("hermes"), pieces);
            assert_eq!(
                answer.calls(),
                [("write_file", json!({"text": "a"}))],
                "{object}"
            );
        }
    }
}

#[test]
fn only_white_space_of_json_is_no_part_of_a_value_or_a_name() {
    let parameters = json!({"properties": {"a": {"type": ["string", "boolean", "null"]}}});
    let tools = Tools::new([("f".to_owned(), parameters)]);
    let format = ToolFormat::named("qwen3_coder").unwrap();
    let parsing = Parsing {
        tools: Some((format, Arc::new(tools))),
        ..Parsing::default()
    };
    for (value, read) in [
        (" true\t", json!(true)),
        ("\u{a0}true", json!("\u{a0}true")),
        ("null\u{3000}", json!("null\u{3000}")),
        ("\u{85}None", json!("\u{85}None")),
    ] {
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        let answer = parse(&parsing, [text.as_str()]);
        assert_eq!(answer.calls(), [("f", json!({"a": read}))]);
    }
    let text = "<tool_call>\n<function=\u{a0}f>\n</function>\n</tool_call>";
    let answer = parse(&parsing, [text]);
    assert_eq!((answer.calls().len(), answer.text.as_str()), (0, text));
}

#[test]
fn a_call_without_arguments_has_an_empty_object() {
    for text in [
        r#"<tool_call>{"name": "now"}</tool_call>"#,
        r#"<tool_call>{"name": "now", "arguments": null}</tool_call>"#,
    ] {
        assert_eq!(
            parse(&named("hermes"), [text]).calls(),
            [("now", json!({}))]
        );
    }
    let kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>";
    assert_eq!(
        parse(&named("kimi_k2"), [kimi]).calls(),
        [("now", json!({}))]
    );
}

#[test]
fn models_that_give_ids_keep_them() {
    let id_of = |family: &str| {
        let family = Family::new(family);
        let text = family.write("", &[("now", json!({}))]);
        parse(&family.parsing, [text.as_str()]).calls[0].id.clone()
    };
    assert_eq!(id_of("kimi_k2").as_deref(), Some("functions.now:0"));
    assert_eq!(id_of("mistral_named").as_deref(), Some("functions.now:0"));
    assert_eq!(id_of("hermes"), None);
}

#[test]
fn python_literals_become_json() {
    let text = r#"[write_file(text='it\'s \x41\n', count=-1.5, list=[1, 'a', None, (True,)], fields={'k': {1: "é"}})]"#;
    for pieces in [vec![text], characters(text).collect()] {
        let expected = json!({"text": "it's A\n", "count": -1.5, "list": [1, "a", null, [true]],
                              "fields": {"k": {"1": "é"}}});
        assert_eq!(
            parse(&named("pythonic"), pieces).calls(),
            [("write_file", expected)]
        );
    }
}

#[test]
fn arguments_are_passed_on_as_they_come() {
    let mut parser = OutputParser::new(named("hermes"));
    let mut pieces = Vec::new();
    let text = r#"<tool_call>{"name": "write_file", "arguments": {"text": "abc"}}</tool_call>"#;
    for piece in characters(text) {
        parser.push(piece, &mut |parsed| {
            if let Parsed::Arguments(piece) = parsed {
                pieces.push(piece.to_owned());
            }
        });
    }
    let expected: Vec<String> = characters(r#"{"text": "abc"}"#)
        .map(str::to_owned)
        .collect();
    assert_eq!(pieces, expected);
}
