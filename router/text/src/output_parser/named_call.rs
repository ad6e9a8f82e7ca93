//! A name, a marker, and the arguments as JSON.

use super::call::{Progress, Reading};
use super::format::{NameStyle, Named};
use super::held::{MAX_NAME_BYTES, Next, SPACES, find};
use super::json::ValueEnd;

#[derive(Debug)]
pub(super) struct NamedCall {
    syntax: &'static Named,
    /// Markers that may follow a name without arguments.
    ends: &'static [&'static str],
    at: At,
}

#[derive(Debug)]
enum At {
    Prefix,
    Name,
    /// Before the arguments.
    Gap(Name),
    Arguments(ValueEnd),
    Over,
}

#[derive(Clone, Debug)]
struct Name {
    tool: String,
    id: Option<String>,
}

impl NamedCall {
    pub(super) fn new(syntax: &'static Named, ends: &'static [&'static str]) -> Self {
        Self {
            syntax,
            ends,
            at: At::Prefix,
        }
    }

    pub(super) fn has_begun(&self) -> bool {
        matches!(self.at, At::Arguments(_) | At::Over)
    }

    pub(super) fn is_complete(&self) -> bool {
        matches!(self.at, At::Over)
    }

    pub(super) fn read(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        match &mut self.at {
            At::Prefix => self.read_prefix(reading),
            At::Name => self.read_name(reading),
            At::Gap(name) => {
                let name = name.clone();
                self.read_gap(&name, reading)
            }
            At::Arguments(end) => {
                let (num_bytes, is_over) = end.read(reading.held.rest());
                reading.arguments_as_they_are(num_bytes);
                if !is_over {
                    return Progress::More;
                }
                self.at = At::Over;
                Progress::Ended
            }
            At::Over => Progress::Ended,
        }
    }

    fn read_prefix(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        match reading.held.next(self.syntax.prefix) {
            Next::Undecided if !self.syntax.prefix.is_empty() => Progress::More,
            Next::Missing => Progress::NoCall,
            Next::Read | Next::Undecided => {
                self.at = At::Name;
                Progress::Again
            }
        }
    }

    fn read_name(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        let rest = reading.held.rest();
        let found = find(rest, &[self.syntax.name_end, "{"]);
        let Some((start, marker)) = found.and_then(|found| Some((found.start, found.marker?)))
        else {
            return match rest.len() > MAX_NAME_BYTES {
                true => Progress::NoCall,
                false => Progress::More,
            };
        };
        let name = split_name(self.syntax.name, rest[..start].trim_matches(SPACES));
        if !reading.tools.declares(&name.tool) {
            return Progress::Undeclared;
        }
        let is_brace = marker == 1;
        let num_marker = if is_brace {
            0
        } else {
            self.syntax.name_end.len()
        };
        reading.held.advance(start + num_marker);
        self.at = At::Gap(name);
        Progress::Again
    }

    fn read_gap(&mut self, name: &Name, reading: &mut Reading<'_, '_>) -> Progress {
        reading.held.skip_whitespace();
        match reading.held.next_byte() {
            None => Progress::More,
            Some(b'{') => {
                reading.begin(&name.tool, name.id.as_deref());
                self.at = At::Arguments(ValueEnd::default());
                Progress::Again
            }
            Some(_) => match reading.held.next_of(self.ends) {
                Next::Undecided => Progress::More,
                Next::Missing => Progress::NoCall,
                Next::Read => {
                    reading.begin(&name.tool, name.id.as_deref());
                    reading.arguments("{}");
                    self.at = At::Over;
                    Progress::Ended
                }
            },
        }
    }
}

/// The tool, and the call's id if the model gives one.
fn split_name(style: NameStyle, text: &str) -> Name {
    let name = |tool: &str, id: Option<&str>| Name {
        tool: tool.to_owned(),
        id: id.map(str::to_owned),
    };
    match style {
        NameStyle::Plain => name(text, None),
        NameStyle::FunctionsIndex => match text.rsplit_once(':') {
            None => name(text, None),
            Some((tool, _)) => name(tool.strip_prefix("functions.").unwrap_or(tool), Some(text)),
        },
        NameStyle::CallId => match text.split_once("[CALL_ID]") {
            None => name(text, None),
            Some((tool, id)) => name(tool.trim_matches(SPACES), Some(id.trim_matches(SPACES))),
        },
    }
}
