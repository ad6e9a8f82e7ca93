//! `text_speed MODEL TEXT`: tokens a second in, and microseconds a token out, on this machine.

use std::error::Error;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::time::Instant;

use plait_openai::{GenerateRequest, prepare};
use plait_text::{ChosenFormats, ModelText, ToolFormat};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(model), Some(text)) = (arguments.next(), arguments.next()) else {
        return Err("usage: text_speed MODEL TEXT".into());
    };
    let begin = Instant::now();
    let model = ModelText::load(&model, None)?;
    let load = begin.elapsed();
    let text = std::fs::read_to_string(text)?;
    let begin = Instant::now();
    let tokens = model.encode(&text, false, usize::MAX)?;
    let encode = begin.elapsed().as_secs_f64();
    let mut out = stdout().lock();
    writeln!(out, "load {load:?}")?;
    writeln!(
        out,
        "tokenise {:.0} tokens/s ({} tokens)",
        tokens.len() as f64 / encode,
        tokens.len()
    )?;
    for stop in [json!([]), json!(["\n\nUser:", "</answer>"])] {
        let seconds = write_answer(&model, &tokens, &json!({"stop": stop}))?;
        let us = seconds * 1e6 / tokens.len() as f64;
        writeln!(out, "write {us:.3} us/token with stop {stop}")?;
    }
    write_calls(model, &mut out)
}

/// What calls with more and more bytes of arguments cost, for each way of calling.
fn write_calls(mut model: ModelText, out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let tool =
        json!({"function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}});
    for (name, before, after) in [
        (
            "hermes",
            r#"<tool_call>{"name": "f", "arguments": {"x": ""#,
            r#""}}</tool_call>"#,
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=x>\n",
            "\n</parameter></function></tool_call>",
        ),
        ("pythonic", r#"[f(x=""#, r#"")]"#),
    ] {
        model = model.with_formats(ChosenFormats {
            reasoning: None,
            tools: Some(ToolFormat::named(name)),
        });
        for num_bytes in [4 << 10, 64 << 10] {
            let inside = "let x = <a> & (b, c);  ".repeat(num_bytes / 23);
            let call = format!("{before}{inside}{after}");
            let tokens = model.encode(&call, false, usize::MAX)?;
            let seconds = write_answer(&model, &tokens, &json!({"tools": [tool]}))?;
            let us = seconds * 1e6 / tokens.len() as f64;
            writeln!(
                out,
                "{name} {us:.3} us/token, {num_bytes} bytes of arguments"
            )?;
        }
    }
    Ok(())
}

/// Seconds for one streamed chat answer of these tokens, one a push.
fn write_answer(model: &ModelText, tokens: &[u32], fields: &Value) -> Result<f64, Box<dyn Error>> {
    let mut request = json!({
        "kind": "chat", "id": "chatcmpl-0123456789abcdef", "created": 1_700_000_000, "model": "m",
        "stream": true, "include_usage": false,
        "messages": [{"role": "user", "content": "Hello"}],
    });
    for (name, value) in fields.as_object().into_iter().flatten() {
        request[name] = value.clone();
    }
    let request: GenerateRequest = serde_json::from_value(request)?;
    let mut response = prepare(model, &request, 8192, &mut || 0)?.response;
    let mut out = Vec::new();
    let begin = Instant::now();
    for token in tokens {
        let _ = response.push(0, &[*token], false, None, &mut out);
        out.clear();
    }
    Ok(begin.elapsed().as_secs_f64())
}
