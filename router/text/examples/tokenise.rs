//! `tokenise MODEL < LINES`: each line of standard input is a JSON string, each line of standard
//! output the list of its tokens, as a completion's prompt is tokenised.

use std::error::Error;
use std::io::{BufRead as _, BufWriter, Write as _, stdin, stdout};
use std::path::PathBuf;

use plait_text::ModelText;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: tokenise MODEL")?;
    let model = ModelText::load(&PathBuf::from(path), None)?;
    let mut out = BufWriter::new(stdout().lock());
    for line in stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        serde_json::to_writer(&mut out, &model.encode(&text, true, usize::MAX)?)?;
        out.write_all(b"\n")?;
    }
    Ok(out.flush()?)
}
