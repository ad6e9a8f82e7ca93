//! `f(a=1, b="x")`: Python's literals, which become a JSON object.

use super::call::{Progress, Reading};
use super::held::{MAX_NAME_BYTES, SPACES};
use super::python_value::PythonValue;

#[derive(Debug, Default)]
pub(super) struct PythonCall {
    at: At,
    num_arguments: usize,
    value: PythonValue,
}

#[derive(Clone, Copy, Debug, Default)]
enum At {
    #[default]
    Name,
    BeforeKey,
    Value,
    AfterValue,
}

impl PythonCall {
    pub(super) fn has_begun(&self) -> bool {
        !matches!(self.at, At::Name)
    }

    pub(super) fn read(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        match self.at {
            At::Name => self.read_name(reading),
            At::BeforeKey => self.read_key(reading),
            At::Value => {
                let is_over = self.value.read(reading);
                if is_over {
                    self.at = At::AfterValue;
                }
                if is_over {
                    Progress::Again
                } else {
                    Progress::More
                }
            }
            At::AfterValue => self.read_after_value(reading),
        }
    }

    fn read_name(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        let rest = reading.held.rest();
        let is_part = |letter: char| letter.is_alphanumeric() || "_.-".contains(letter);
        match rest.find(|letter| !is_part(letter)) {
            None if rest.len() > MAX_NAME_BYTES => Progress::NoCall,
            None => Progress::More,
            Some(end) if end > 0 && rest[end..].starts_with('(') => {
                let name = rest[..end].to_owned();
                if !reading.tools.declares(&name) {
                    return Progress::Undeclared;
                }
                reading.held.advance(end + 1);
                reading.begin(&name, None);
                self.at = At::BeforeKey;
                Progress::Again
            }
            Some(_) => Progress::NoCall,
        }
    }

    fn read_key(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        reading.held.skip_whitespace();
        let rest = reading.held.rest();
        if rest.starts_with(')') {
            reading.held.advance(1);
            return self.close(reading);
        }
        let Some(end) = rest.find(['=', ')', '(', '\n']) else {
            return match rest.len() > MAX_NAME_BYTES {
                true => self.close(reading),
                false => Progress::More,
            };
        };
        if !rest[end..].starts_with('=') {
            return self.close(reading);
        }
        let key = rest[..end].trim_matches(SPACES).replace(['"', '\\'], "");
        let comma = if self.num_arguments == 0 { "{" } else { ", " };
        self.num_arguments += 1;
        reading.held.advance(end + 1);
        reading.arguments(&format!("{comma}\"{key}\": "));
        self.value = PythonValue::default();
        self.at = At::Value;
        Progress::Again
    }

    fn read_after_value(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        reading.held.skip_whitespace();
        let next = reading.held.next_byte();
        reading
            .held
            .advance(usize::from(matches!(next, Some(b',' | b')'))));
        match next {
            None => Progress::More,
            Some(b',') => {
                self.at = At::BeforeKey;
                Progress::Again
            }
            Some(_) => self.close(reading),
        }
    }

    /// What is no argument ends the call.
    fn close(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        reading.arguments(if self.num_arguments == 0 { "{}" } else { "}" });
        Progress::Ended
    }

    /// No text follows: passes on the value so far.
    pub(super) fn flush(&mut self, reading: &mut Reading<'_, '_>) {
        self.value.flush(reading);
        if !matches!(self.at, At::Value) {
            reading.held.advance_to_end();
        }
    }
}
