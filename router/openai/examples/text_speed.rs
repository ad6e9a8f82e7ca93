//! `text_speed MODEL TEXT`: tokens a second in, and microseconds a token out, on this machine.

use std::error::Error;
use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::time::Instant;

use plait_openai::{GenerateRequest, Grammars, prepare};
use plait_text::ModelText;
use serde_json::json;

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
        let seconds = write_answer(&model, &tokens, &stop)?;
        let us = seconds * 1e6 / tokens.len() as f64;
        writeln!(out, "write {us:.3} us/token with stop {stop}")?;
    }
    Ok(())
}

/// Seconds for one streamed chat answer of these tokens, one a push.
fn write_answer(
    model: &ModelText,
    tokens: &[u32],
    stop: &serde_json::Value,
) -> Result<f64, Box<dyn Error>> {
    let request: GenerateRequest = serde_json::from_value(json!({
        "kind": "chat", "id": "chatcmpl-0123456789abcdef", "created": 1_700_000_000, "model": "m",
        "stream": true, "include_usage": false, "stop": stop,
        "messages": [{"role": "user", "content": "Hello"}],
    }))?;
    let grammars = Grammars::new(|_, _| {});
    let mut response = prepare(model, &request, 8192, &grammars, &mut || 0)?.response;
    let mut out = Vec::new();
    let begin = Instant::now();
    for token in tokens {
        let _ = response.push(0, &[*token], false, None, &mut out);
        out.clear();
    }
    Ok(begin.elapsed().as_secs_f64())
}
