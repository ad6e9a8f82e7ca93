//! Where JSON may have spaces.

use serde_json::{Value, json};

use crate::error::CompileError;

/// Runs of spaces between JSON's tokens: enough for any indentation, and no answer of spaces alone.
const SPACES: &str = r"[ \n\r\t]{1,128}";
/// What JSON takes between its tokens.
const ANY_SPACE: &str = r"[ \n\r\t]";
/// Of a client's expression.
const MAX_BYTES: usize = 256;

/// Where JSON may have spaces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Whitespace {
    /// Between all tokens of JSON, as the model likes; a run is bounded.
    #[default]
    Free,
    /// Nowhere.
    None,
    /// Between all tokens of JSON, what this regular expression matches.
    Pattern(String),
}

impl Whitespace {
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Self::Pattern(pattern) => pattern.len(),
            Self::Free | Self::None => 0,
        }
    }

    /// Adds the library's option. A pattern that may match what is no space of JSON is refused.
    pub(crate) fn write(&self, options: &mut Value) -> Result<(), CompileError> {
        match self {
            Self::Free => options["whitespace_pattern"] = SPACES.into(),
            Self::None => options["whitespace_flexible"] = json!(false),
            Self::Pattern(pattern) => options["whitespace_pattern"] = checked(pattern)?.into(),
        }
        Ok(())
    }
}

/// The pattern as the library takes it.
fn checked(pattern: &str) -> Result<String, CompileError> {
    CompileError::check_size("bytes in its whitespace pattern", pattern.len(), MAX_BYTES)?;
    let (mut rest, mut checked, mut is_class) = (pattern.chars(), String::new(), false);
    while let Some(next) = rest.next() {
        match next {
            '\\' => match rest.next() {
                Some('s') => checked += ANY_SPACE,
                Some(escape @ ('n' | 'r' | 't')) => checked.extend(['\\', escape]),
                _ => return Err(no_space(pattern)),
            },
            ' ' | '\n' | '\r' | '\t' => checked.push(next),
            ']' if is_class => {
                is_class = false;
                checked.push(next);
            }
            _ if is_class => return Err(no_space(pattern)),
            '[' => {
                is_class = true;
                checked.push(next);
            }
            '(' | ')' | '{' | '}' | '?' | '*' | '+' | '|' => checked.push(next),
            ':' if checked.ends_with("(?") => checked.push(next),
            '0'..='9' | ',' if is_counting(&checked) => checked.push(next),
            _ => return Err(no_space(pattern)),
        }
    }
    Ok(checked)
}

/// Whether a count `{m,n}` is open.
fn is_counting(written: &str) -> bool {
    written.rfind('{') > written.rfind('}')
}

fn no_space(pattern: &str) -> CompileError {
    let what =
        format!("the whitespace pattern {pattern:?}, which may match what is no space of JSON");
    CompileError::unsupported(what, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_spaces_pass_and_others_do_not() {
        for (pattern, expected) in [
            (r"[ ]?", r"[ ]?"),
            (r"[\n\t ]*", r"[\n\t ]*"),
            (r"\s{0,2}", r"[ \n\r\t]{0,2}"),
            (r"(?:\n| )+", r"(?:\n| )+"),
        ] {
            assert_eq!(checked(pattern).as_deref(), Ok(expected), "{pattern}");
        }
        for pattern in [
            "a", ".", "[^ ]", r"\S", "[ -z]", "1", "[ ,]", "[?:]", "[(]", r"\",
        ] {
            assert!(checked(pattern).is_err(), "{pattern}");
        }
    }
}
