//! Calls that must come: whatever the model would say, what its client reads validates.

use std::fs;
use std::path::Path;

use plait_core::FinishReason;
use plait_grammar::{Allowed, Matcher};
use plait_openai::{GenerateRequest, Prepared};
use plait_text::{ChosenFormats, ModelText, ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_level, merge};
use crate::support::{chat, constrained, prepare};

const FAMILIES: [&str; 10] = [
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "deepseek_v3",
    "deepseek_v31",
    "minimax_m2",
    "mistral",
    "glm45",
    "kimi_k2",
];

fn model(family: &str, template: &str) -> ModelText {
    let folder = Folder::new(&byte_level());
    folder.write("chat_template.jinja", template);
    folder.load().with_formats(ChosenFormats {
        reasoning: Some(ReasoningFormat::named("qwen3")),
        tools: Some(ToolFormat::named(family)),
    })
}

fn plan() -> Value {
    json!({"type": "function", "function": {"name": "plan", "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 5},
            "days": {"type": "integer", "minimum": 1, "maximum": 12},
            "unit": {"enum": ["c", "f\"", null]},
            "tags": {"type": "array", "items": {"enum": [true, "x"]}, "maxItems": 2},
            "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}, {"type": "integer"}]},
            "year": {"$ref": "#/$defs/Year"},
        },
        "required": ["city", "days"],
        "additionalProperties": false,
        "$defs": {"Year": {"type": "string", "pattern": "^[0-9]{4}$"}},
    }}})
}

fn now() -> Value {
    json!({"type": "function", "function": {"name": "now"}})
}

fn is_plan(arguments: &Value) -> bool {
    let fields = arguments.as_object().unwrap();
    let holds = |(name, value): (&String, &Value)| match name.as_str() {
        "city" => (1..6).contains(&value.as_str().unwrap_or_default().chars().count()),
        "days" => (1..13).contains(&value.as_u64().unwrap_or_default()),
        "unit" => [json!("c"), json!("f\""), Value::Null].contains(value),
        "tags" => value
            .as_array()
            .is_some_and(|tags| tags.len() < 3 && tags.iter().all(|it| *it == true || *it == "x")),
        "note" => match value {
            Value::String(text) => text.chars().count() < 5,
            value => value.is_null() || value.as_f64().is_some_and(|it| it.fract() == 0.0),
        },
        "year" => value
            .as_str()
            .is_some_and(|year| year.len() == 4 && year.bytes().all(|it| it.is_ascii_digit())),
        _ => false,
    };
    ["city", "days"]
        .iter()
        .all(|name| fields.contains_key(*name))
        && fields.iter().all(holds)
}

fn asked(changes: &Value) -> GenerateRequest {
    let mut fields = json!({
        "stream": false, "tools": [plan(), now()], "tool_choice": {"mode": "required"},
    });
    merge(&mut fields, changes);
    chat(&fields)
}

/// Deterministic numbers (splitmix64).
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % bound as u64).unwrap()
    }
}

fn allowed(model: &ModelText, matcher: &mut Matcher) -> (Allowed, Vec<u32>) {
    let mut mask = vec![0; (model.vocab_size() as usize).div_ceil(32)];
    let allowed = matcher.allowed(&mut mask).unwrap();
    let open = (0..model.vocab_size()).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
    (allowed, open.collect())
}

/// What a model says that knows nothing: any token that is allowed, spaces seldom.
fn babble(model: &ModelText, prepared: &Prepared, seed: u64) -> Vec<u32> {
    let mut matcher = prepared.prompts[0].choices[0]
        .grammar
        .as_ref()
        .unwrap()
        .matcher();
    let mut draw = Draw(seed);
    let mut tokens = Vec::new();
    let is_space = |id: &u32| {
        let text = model.vocabulary().piece(*id).bytes;
        text.iter().all(u8::is_ascii_whitespace) && !text.is_empty()
    };
    while tokens.len() < 4000 {
        let (what, mut open) = allowed(model, &mut matcher);
        let ends = open.iter().any(|id| model.eos_token_ids().contains(id));
        if what == Allowed::OnlyEnd || ends && draw.below(2) == 0 {
            return tokens;
        }
        open.retain(|id| !model.eos_token_ids().contains(id));
        if draw.below(10) > 0 && !open.iter().all(is_space) {
            open.retain(|id| !is_space(id));
        }
        let token = open[draw.below(open.len())];
        matcher.accept(token).unwrap();
        tokens.push(token);
    }
    panic!("it never ends: {}", model.decode(&tokens));
}

/// The whole answer's choice, told token by token.
fn answer(model: &ModelText, request: &GenerateRequest, tokens: &[u32]) -> Value {
    let mut response = prepare(model, request).unwrap().response;
    let mut out = Vec::new();
    for token in tokens {
        let _ = response.push(0, &[*token], false, None, &mut out);
    }
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    let body: Value = serde_json::from_slice(&out).unwrap();
    body["choices"][0].clone()
}

fn check_calls(choice: &Value) -> usize {
    assert_eq!(choice["message"]["content"], Value::Null, "{choice}");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    for call in calls {
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).expect(arguments);
        match call["function"]["name"].as_str().unwrap() {
            "plan" => assert!(is_plan(&arguments), "{arguments}"),
            _ => assert_eq!(arguments, json!({})),
        }
    }
    calls.len()
}

fn assert_validates(family: &str) {
    let model = model(family, "{{ messages[0].content }}</think>");
    let request = asked(&json!({}));
    let prepared = constrained(&model, &request).unwrap();
    let mut num_calls = 0;
    for seed in 0..24 {
        let tokens = babble(&model, &prepared, seed);
        let choice = answer(&model, &request, &tokens);
        assert_eq!(
            choice["finish_reason"],
            "tool_calls",
            "{}",
            model.decode(&tokens)
        );
        num_calls += check_calls(&choice);
    }
    assert!(num_calls > 24, "some answers have several calls");
}

macro_rules! families {
    ($($name:ident)*) => {
        mod whatever_a_model_says_its_calls_validate {
            $(#[test] fn $name() { super::assert_validates(stringify!($name)); })*

            #[test]
            fn of_all_families() {
                assert_eq!([$(stringify!($name)),*], super::FAMILIES);
            }
        }
    };
}

families!(
    hermes qwen3_coder llama3_json pythonic deepseek_v3 deepseek_v31 minimax_m2 mistral glm45 kimi_k2
);

fn takes(model: &ModelText, matcher: &mut Matcher, text: &str) -> bool {
    let mut tokens = model.encode(text, false, usize::MAX).unwrap().into_iter();
    tokens.all(|token| {
        let (what, open) = allowed(model, matcher);
        let is_open = matches!(what, Allowed::All | Allowed::Free) || open.contains(&token);
        is_open && matcher.accept(token).is_ok()
    })
}

fn ends(model: &ModelText, matcher: &mut Matcher) -> bool {
    let (_, open) = allowed(model, matcher);
    open.iter().any(|id| model.eos_token_ids().contains(id))
}

fn said(model: &ModelText, request: &GenerateRequest, text: &str) -> bool {
    let prepared = constrained(model, request).unwrap();
    let mut matcher = prepared.prompts[0].choices[0]
        .grammar
        .as_ref()
        .unwrap()
        .matcher();
    takes(model, &mut matcher, text) && ends(model, &mut matcher)
}

/// Calls as the family's own template writes them.
fn written(family: &str, calls: &[(&str, Value)]) -> String {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../text/tests/fixtures/tools");
    let name = if family == "mistral" {
        "mistral_named"
    } else {
        family
    };
    let template = fs::read_to_string(fixtures.join(format!("{name}.jinja"))).unwrap();
    let id = |index: usize, name: &str| match family {
        "mistral" => format!("abcdefgh{index}"),
        _ => format!("functions.{name}:{index}"),
    };
    let calls = calls.iter().enumerate().map(|(index, (name, arguments))| {
        json!({"type": "function", "id": id(index, name),
               "function": {"name": name, "arguments": arguments.to_string()}})
    });
    let calls: Vec<Value> = calls.collect();
    let messages = json!([
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]);
    let request = chat(&json!({"messages": messages, "add_generation_prompt": false}));
    let model = model(family, &template);
    let prepared = prepare(&model, &request).unwrap();
    let text = model.decode(&prepared.prompts[0].request.prompt);
    let (_, text) = text.split_once("<|assistant|>").unwrap();
    text.strip_suffix("<|end|>")
        .unwrap()
        .trim_start()
        .to_owned()
}

#[test]
fn what_a_familys_template_writes_is_what_its_calls_are_held_to() {
    let arguments = json!({"city": "Ulm", "days": 3, "unit": "c", "tags": ["x"], "note": null});
    for family in FAMILIES {
        let text = written(family, &[("plan", arguments.clone()), ("now", json!({}))]);
        for (changes, is_one) in [
            (json!({}), true),
            (json!({"single_call": true}), false),
            (
                json!({"tool_choice": {"mode": "required", "names": ["now"]}}),
                false,
            ),
        ] {
            let model = model(family, "{{ messages[0].content }}</think>");
            assert_eq!(
                said(&model, &asked(&changes), &text),
                is_one,
                "{family} {changes}: {text}"
            );
        }
    }
}

#[test]
fn a_named_tool_is_called_once_and_the_answer_stops() {
    let model = model("hermes", "{{ messages[0].content }}</think>");
    let named = json!({"tool_choice": {"mode": "named", "names": ["plan"]}});
    let request = asked(&named);
    let tokens = babble(&model, &constrained(&model, &request).unwrap(), 1);
    let choice = answer(&model, &request, &tokens);
    assert_eq!(
        (check_calls(&choice), &choice["finish_reason"]),
        (1, &json!("stop"))
    );
    assert_eq!(
        choice["message"]["tool_calls"][0]["function"]["name"],
        "plan"
    );
}

fn strict(mut tool: Value) -> Value {
    tool["function"]["strict"] = json!(true);
    tool
}

#[test]
fn a_strict_tool_is_held_to_its_schema_from_the_call_on_and_others_are_not() {
    let other = json!({"type": "function", "function": {"name": "other", "parameters": plan()["function"]["parameters"]}});
    let auto = json!({"tools": [strict(plan()), other], "tool_choice": {"mode": "auto"}});
    let (good, bad) = (
        json!({"city": "Ulm", "days": 3}),
        json!({"city": "Ulm", "days": 30}),
    );
    for family in FAMILIES {
        let model = model(family, "{{ messages[0].content }}</think>");
        let said = |text: &str| said(&model, &asked(&auto), text);
        assert!(said("") && said("Just text, 1 < 2."), "{family}");
        assert!(
            said(&written(family, &[("plan", good.clone())])),
            "{family}"
        );
        assert!(
            said(&written(family, &[("other", bad.clone())])),
            "{family}"
        );
        assert!(
            !said(&written(family, &[("plan", bad.clone())])),
            "{family}"
        );
        if !["llama3_json", "pythonic"].contains(&family) {
            let later = format!("I look.\n{}", written(family, &[("plan", good.clone())]));
            assert!(said(&later), "{family}");
        }
    }
    let none = json!({"tools": [plan()], "tool_choice": {"mode": "auto"}});
    assert_eq!(
        prepare(&model("hermes", "x"), &asked(&none))
            .unwrap()
            .constraint,
        None
    );
}

#[test]
fn calls_come_behind_the_thought_that_the_prompt_opened_or_the_model_may_begin() {
    let call = written("hermes", &[("now", json!({}))]);
    for (template, text, is_one) in [
        ("hi<think>\n", format!("so\n</think>\n\n{call}"), true),
        ("hi<think>\n", call.clone(), false),
        ("hi", format!("<think>so</think>\n\n{call}"), true),
        ("hi", call.clone(), true),
        ("hi<think></think>", call.clone(), true),
        (
            "hi<think></think>",
            format!("<think>so</think>{call}"),
            false,
        ),
    ] {
        let model = model("hermes", template);
        assert_eq!(
            said(&model, &asked(&json!({})), &text),
            is_one,
            "{template:?} {text:?}"
        );
    }
    let off = json!({"reasoning_effort": "none"});
    let model = model("hermes", "hi");
    assert!(!said(
        &model,
        &asked(&off),
        &format!("<think>so</think>{call}")
    ));
}

#[test]
fn structured_output_comes_behind_the_thought() {
    let model = model("hermes", "hi<think>");
    let constraint = json!({"param": "regex", "constraint": "regex", "text": "[0-9]"});
    let request = chat(&json!({"constraint": constraint}));
    assert!(said(&model, &request, "I think</think>\n\n7"));
    assert!(!said(&model, &request, "I think</think>\n\nx"));
    assert!(!said(&model, &request, "7"));
}

#[test]
fn a_thoughts_budget_is_all_that_holds_a_free_answer() {
    let model = model("hermes", "hi<think>");
    let request = chat(&json!({"stream": false, "thinking_token_budget": 3}));
    let prepared = constrained(&model, &request).unwrap();
    assert!(prepared.prompts[0].request.is_masked);
    let mut matcher = prepared.prompts[0].choices[0]
        .grammar
        .as_ref()
        .unwrap()
        .matcher();
    let mut tokens = model.encode("xyz", false, usize::MAX).unwrap();
    assert_eq!(tokens.len(), 3);
    assert!(
        takes(&model, &mut matcher, "xyz") && !takes(&model, &mut matcher.clone_for_choice(), "a")
    );
    while let (Allowed::Some, open) = allowed(&model, &mut matcher) {
        assert_eq!(open.len(), 1);
        matcher.accept(open[0]).unwrap();
        tokens.extend(open);
    }
    tokens.extend(model.encode("then", false, usize::MAX).unwrap());
    let message = &answer(&model, &request, &tokens)["message"];
    assert_eq!(
        (&message["reasoning"], &message["content"]),
        (&json!("xyz"), &json!("then"))
    );
    let closed = chat(&json!({"thinking_token_budget": 3}));
    let closed = prepare(&self::model("hermes", "hi</think>"), &closed).unwrap();
    assert!(closed.constraint.is_none() && !closed.prompts[0].request.is_masked);
}

#[test]
fn a_listed_value_is_taken_as_text_only_where_the_other_keywords_hold_for_it() {
    let held = |schema: Value, value: Value| {
        let tool = json!({"function": {"name": "f", "parameters": {"properties": {"a": schema}, "required": ["a"]}}});
        let request = asked(&json!({"tools": [tool]}));
        let call = written("qwen3_coder", &[("f", json!({"a": value}))]);
        said(&model("qwen3_coder", "hi"), &request, &call)
    };
    for (schema, good, bad) in [
        (
            json!({"enum": ["a", "bb", "ccc"], "minLength": 2, "maxLength": 2}),
            "bb",
            vec!["a", "ccc"],
        ),
        (
            json!({"enum": ["a", 1, null], "type": "string"}),
            "a",
            vec!["1", "null"],
        ),
        (
            json!({"enum": ["a", 1, 2, 9], "minimum": 2, "exclusiveMaximum": 9}),
            "2",
            vec!["1", "9"],
        ),
        (
            json!({"enum": ["a", 2, 3], "multipleOf": 3}),
            "3",
            vec!["2"],
        ),
        (
            json!({"enum": ["a", 3, 2.5], "type": ["integer", "string"]}),
            "3",
            vec!["2.5"],
        ),
        (json!({"enum": ["a", "b"], "const": "b"}), "b", vec!["a"]),
    ] {
        assert!(held(schema.clone(), json!(good)), "{schema} {good}");
        for bad in bad {
            assert!(!held(schema.clone(), json!(bad)), "{schema} {bad}");
        }
    }
}

// budget: a table of refusals
#[test]
fn calls_that_cannot_be_held_are_refused_by_name() {
    let with = |parameters: Value| json!([{"function": {"name": "f", "parameters": parameters}}]);
    let regex = json!({"param": "response_format", "constraint": "regex", "text": "a"});
    for (family, fields, param, says) in [
        (
            "hermes",
            json!({"tools": []}),
            "tool_choice",
            "without `tools`",
        ),
        (
            "hermes",
            json!({"tool_choice": {"mode": "named", "names": ["leap"]}}),
            "tool_choice",
            "\"leap\"",
        ),
        (
            "hermes",
            json!({"tool_choice": {"mode": "required", "names": []}}),
            "tool_choice",
            "no tool",
        ),
        (
            "hermes",
            json!({"constraint": regex}),
            "response_format",
            "beside `tools`",
        ),
        (
            "hermes",
            json!({"min_tokens": 3}),
            "min_tokens",
            "leave one out",
        ),
        (
            "hermes",
            json!({"tools": with(json!({"properties": {"a": {"not": {}}}}))}),
            "tools[0].function.parameters",
            "`not` at `/properties/a`",
        ),
        (
            "hermes",
            json!({"tools": with(json!({"type": "string"}))}),
            "tools[0].function.parameters",
            "`type` \"string\"",
        ),
        (
            "qwen3_coder",
            json!({"tools": with(json!({"anyOf": [{"required": ["a"]}]}))}),
            "tools[0].function.parameters",
            "`anyOf`",
        ),
        (
            "qwen3_coder",
            json!({"tools": with(json!({"properties": {"a": {"enum": ["a", "b"], "pattern": "a"}}}))}),
            "tools[0].function.parameters",
            "`pattern` beside `enum`",
        ),
        (
            "qwen3_coder",
            json!({"tools": with(json!({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}))}),
            "tools[0].function.parameters",
            "`not`",
        ),
        (
            "qwen3_coder",
            json!({"tools": with(choices_within_choices())}),
            "tools[0].function.parameters",
            "choices within choices",
        ),
        (
            "glm45",
            json!({"tools": with(copied_definitions())}),
            "tools[0].function.parameters",
            "bytes of definitions for 2000 arguments",
        ),
        (
            "pythonic",
            json!({"tools": with(json!({"properties": {"a=b": {}}}))}),
            "tools[0].function.parameters",
            "\"a=b\"",
        ),
        (
            "hermes",
            json!({"thinking_token_budget": -1}),
            "thinking_token_budget",
            "-1",
        ),
    ] {
        let error = prepare(&model(family, "hi"), &asked(&fields)).unwrap_err();
        assert_eq!(error.param, param, "{}", error.message);
        assert!(error.message.contains(says), "{}", error.message);
    }
    let plain = Folder::new(&byte_level()).load();
    let error = prepare(&plain, &chat(&json!({"thinking_token_budget": 1}))).unwrap_err();
    assert!(
        error.message.contains("--reasoning-parser"),
        "{}",
        error.message
    );
}

/// Of which 100^3 schemas would be looked at.
fn choices_within_choices() -> Value {
    let hundred = |schema: Value| json!({"anyOf": vec![schema; 100]});
    json!({
        "properties": {"a": hundred(json!({"$ref": "#/$defs/b"}))},
        "$defs": {"b": hundred(json!({"$ref": "#/$defs/c"})), "c": hundred(json!({"type": "string"}))},
    })
}

fn copied_definitions() -> Value {
    let properties = (0..2000).map(|number| (format!("a{number}"), json!({"$ref": "#/$defs/b"})));
    let properties: serde_json::Map<String, Value> = properties.collect();
    json!({"properties": properties, "$defs": {"b": {"type": "string", "enum": ["x".repeat(4000)]}}})
}
