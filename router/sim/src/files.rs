//! Files that users give: JSON descriptions of hardware and models, and files of lines.

use std::fs::File;
use std::io::{BufRead, Read};
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::SimError;

/// Descriptions of hardware and models are a page of text.
const MAX_BYTES: u64 = 1 << 20;

/// The longest line of a trace has 32,768 ids of up to 12 bytes.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// A description that is compiled in.
pub(crate) type BuiltIn = (&'static str, &'static str);

/// The built-in description of this name, or the file at this path.
pub(crate) fn describe<T: DeserializeOwned>(
    setting: &str,
    name: &str,
    built_in: &[BuiltIn],
) -> Result<T, SimError> {
    if let Some((_, text)) = built_in.iter().find(|(known, _)| *known == name) {
        return Ok(serde_json::from_str(text).expect("the built-in descriptions are whole"));
    }
    let path = Path::new(name);
    if !path.is_file() {
        let known: Vec<&str> = built_in.iter().map(|(known, _)| *known).collect();
        let allowed = format!("allowed: {}, or a file", known.join(", "));
        return Err(SimError::setting(setting, &name, allowed));
    }
    serde_json::from_str(&read(path)?).map_err(|error| SimError::content(path, error.to_string()))
}

fn read(path: &Path) -> Result<String, SimError> {
    let failed = |source| SimError::File {
        path: path.to_owned(),
        source,
    };
    let mut text = String::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_BYTES {
        let problem = format!("it is longer than {MAX_BYTES} bytes, which is allowed");
        return Err(SimError::content(path, problem));
    }
    Ok(text)
}

/// The next line with any line ending; None after the last.
pub(crate) fn next_line(file: &mut impl BufRead) -> Result<Option<Vec<u8>>, String> {
    let mut line = Vec::new();
    let num_read = file
        .take(MAX_LINE_BYTES + 1)
        .read_until(b'\n', &mut line)
        .map_err(|error| error.to_string())?;
    if num_read as u64 > MAX_LINE_BYTES {
        return Err(format!(
            "the line is longer than {MAX_LINE_BYTES} bytes, which is allowed"
        ));
    }
    Ok((num_read > 0).then_some(line))
}
