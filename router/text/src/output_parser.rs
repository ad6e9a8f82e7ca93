//! From an output's text to thoughts, content and tool calls, in one pass.
//!
//! The parser holds back only what may still become a marker, or a call that may still turn out to be none; such a
//! call becomes content, byte for byte. What a family writes is data: [`ReasoningFormat`], [`ToolFormat`].

mod call;
mod channel;
mod format;
mod held;
mod json;
mod named_call;
mod object_call;
mod python_call;
mod python_value;
mod tagged_call;
mod tools;
mod writing;

use std::sync::Arc;

use call::{Call, Progress, Reading};
use channel::Trimmed;
use held::{Held, Next, find};

pub use format::{CallIds, ReasoningFormat, ToolFormat};
pub use tools::{Accepts, Kind, Tools};
pub use writing::{ArgumentsWriting, NameEnd, TaggedWriting, Writing};

/// A piece of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// The answer's content.
    Text(&'a str),
    /// What the model thinks first.
    Thought(&'a str),
    /// A call of a declared tool.
    CallBegun {
        /// The tool.
        name: &'a str,
        /// The call's id, if the model gives one.
        id: Option<&'a str>,
    },
    /// The call's arguments, JSON as the model writes it; all pieces together are the whole.
    Arguments(&'a str),
    /// Nothing follows of the call's arguments.
    CallEnded,
    /// The output ended within the call.
    CallCutOff,
    /// What looked like a call became content.
    NoCall,
}

/// Takes what a parser makes of a text.
pub type Emit<'a> = &'a mut dyn FnMut(Parsed<'_>);

/// What is to be found in an output.
#[derive(Clone, Debug, Default)]
pub struct Parsing {
    /// Markers of thoughts.
    pub reasoning: Option<&'static ReasoningFormat>,
    /// The prompt ends within a thought.
    pub starts_in_thought: bool,
    /// How calls are written, and the tools that may be called.
    pub tools: Option<(&'static ToolFormat, Arc<Tools>)>,
}

/// Sorts one output's text.
#[derive(Debug)]
pub struct OutputParser {
    reasoning: Option<&'static ReasoningFormat>,
    tools: Option<(&'static ToolFormat, Arc<Tools>)>,
    stage: Stage,
    held: Held,
    thought: Trimmed,
    text: Trimmed,
    /// What may begin something within content.
    markers: Vec<&'static str>,
    /// No content came, only thoughts and calls.
    is_fresh: bool,
}

#[derive(Debug)]
enum Stage {
    Thought,
    /// Content, in which something else may begin.
    Content,
    /// Before a call of several, or after one.
    Between {
        after_call: bool,
        has_separator: bool,
    },
    Call(Call),
}

impl OutputParser {
    /// A parser of an output without text.
    pub fn new(parsing: Parsing) -> Self {
        let Parsing {
            reasoning,
            starts_in_thought,
            tools,
        } = parsing;
        let in_text = tools
            .iter()
            .flat_map(|(format, _)| format.markers_in_text());
        let opens = reasoning.filter(|_| !starts_in_thought);
        Self {
            markers: opens.map(|it| it.open).into_iter().chain(in_text).collect(),
            stage: match starts_in_thought && reasoning.is_some() {
                true => Stage::Thought,
                false => Stage::Content,
            },
            text: Trimmed::new(starts_in_thought, tools.is_some() || opens.is_some()),
            thought: Trimmed::new(true, true),
            reasoning,
            tools,
            held: Held::default(),
            is_fresh: true,
        }
    }

    /// Whether a special token of this text is part of some marker.
    pub fn reads(&self, special: &str) -> bool {
        let reasoning = self.reasoning.iter().flat_map(|it| [it.open, it.close]);
        let tools = self.tools.iter().flat_map(|(format, _)| format.markers());
        !special.is_empty() && reasoning.chain(tools).any(|it| it.contains(special))
    }

    /// Whether the output is within a thought.
    pub fn is_thinking(&self) -> bool {
        matches!(self.stage, Stage::Thought)
    }

    /// Takes the next text and passes on what is certain now.
    pub fn push(&mut self, piece: &str, emit: Emit<'_>) {
        if self.finds_nothing_more() {
            emit(Parsed::Text(piece));
            return;
        }
        self.held.push(piece);
        while self.step(emit) {}
        self.held.end_push();
    }

    /// No text follows: passes on what was held back.
    pub fn finish(&mut self, emit: Emit<'_>) {
        if let Stage::Call(call) = &mut self.stage
            && call.has_begun()
        {
            let none = Tools::default();
            let tools = self.tools.as_ref().map_or(&none, |(_, tools)| tools);
            let mut reading = Reading {
                held: &mut self.held,
                tools,
                emit,
            };
            let is_whole = call.finish(&mut reading) == Progress::Ended;
            emit(if is_whole {
                Parsed::CallEnded
            } else {
                Parsed::CallCutOff
            });
            return;
        }
        let is_between = matches!(
            self.stage,
            Stage::Between {
                after_call: true,
                ..
            }
        );
        if matches!(
            self.stage,
            Stage::Call(_)
                | Stage::Between {
                    after_call: false,
                    ..
                }
        ) {
            emit(Parsed::NoCall);
        }
        self.held.rewind_if_kept();
        let rest = std::mem::take(&mut self.held);
        match &self.stage {
            Stage::Thought => self
                .thought
                .write(rest.rest(), &mut |it| emit(Parsed::Thought(it))),
            _ if is_between && rest.rest().trim().is_empty() => {}
            _ => {
                let mut show = |it: &str| emit(Parsed::Text(it));
                self.text.write(rest.rest(), &mut show);
                self.text.finish(&mut show);
            }
        }
    }

    /// Whether all that follows is content.
    fn finds_nothing_more(&self) -> bool {
        let is_content = matches!(self.stage, Stage::Content) && self.held.is_empty();
        is_content && self.markers.is_empty() && !self.is_fresh
    }

    /// Whether another step may follow.
    fn step(&mut self, emit: Emit<'_>) -> bool {
        match self.stage {
            Stage::Thought => self.read_thought(emit),
            Stage::Content => self.read_content(emit),
            Stage::Between {
                after_call,
                has_separator,
            } => self.read_between(after_call, has_separator, emit),
            Stage::Call(_) => self.read_call(emit),
        }
    }

    fn read_thought(&mut self, emit: Emit<'_>) -> bool {
        let Some(format) = self.reasoning else {
            return self.go_to(Stage::Content);
        };
        let rest = self.held.rest();
        let found = find(rest, &[format.close]);
        let end = found.map_or(rest.len(), |found| found.start);
        let mut show = |it: &str| emit(Parsed::Thought(it));
        self.thought.write(&rest[..end], &mut show);
        self.held.advance(end);
        if found.and_then(|found| found.marker).is_none() {
            return false;
        }
        self.held.advance(format.close.len());
        self.text.cut();
        self.end_thoughts();
        self.go_to(Stage::Content)
    }

    /// A thought comes first or not at all.
    fn end_thoughts(&mut self) {
        if let Some(format) = self.reasoning {
            self.markers.retain(|marker| *marker != format.open);
        }
        if self.tools.is_none() {
            self.text.end_trimming();
        }
    }

    fn go_to(&mut self, stage: Stage) -> bool {
        self.stage = stage;
        true
    }

    fn read_content(&mut self, emit: Emit<'_>) -> bool {
        if self.is_fresh && self.begins_bare() {
            return self.begin_calls(0);
        }
        let rest = self.held.rest();
        let found = find(rest, &self.markers);
        let end = found.map_or(rest.len(), |found| found.start);
        let has_text = !rest[..end].trim_start().is_empty();
        self.show_text(end, emit);
        if has_text && self.is_fresh {
            self.is_fresh = false;
            self.end_thoughts();
            return true;
        }
        let Some(marker) = found.and_then(|found| found.marker) else {
            return false;
        };
        self.begin(self.markers[marker])
    }

    /// Passes on the next bytes as content.
    fn show_text(&mut self, num_bytes: usize, emit: Emit<'_>) {
        let piece = &self.held.rest()[..num_bytes];
        self.text.write(piece, &mut |it| emit(Parsed::Text(it)));
        self.held.advance(num_bytes);
    }

    /// Whether a call without a marker comes next.
    fn begins_bare(&self) -> bool {
        let bare = self.tools.as_ref().and_then(|(format, _)| format.bare);
        let first = self.held.rest().trim_start().bytes().next();
        bare.is_some() && bare == first
    }

    /// Goes on behind the marker that comes next.
    fn begin(&mut self, marker: &'static str) -> bool {
        if self.reasoning.is_some_and(|format| format.open == marker) {
            self.held.advance(marker.len());
            self.text.cut();
            return self.go_to(Stage::Thought);
        }
        let is_call = self
            .tools
            .as_ref()
            .is_some_and(|(format, _)| format.call_begin == marker);
        let marker = if is_call { "" } else { marker };
        self.begin_calls(marker.len())
    }

    fn begin_calls(&mut self, num_marker: usize) -> bool {
        self.held.keep();
        self.held.advance(num_marker);
        self.go_to(Stage::Between {
            after_call: false,
            has_separator: false,
        })
    }

    fn read_between(&mut self, after_call: bool, has_separator: bool, emit: Emit<'_>) -> bool {
        let Some((format, _)) = self.tools else {
            return self.go_to(Stage::Content);
        };
        self.held.skip_whitespace();
        let Some(first) = self.held.next_byte() else {
            return false;
        };
        let again = |has_separator| Stage::Between {
            after_call,
            has_separator,
        };
        if after_call {
            match self.held.next_of(format.ends) {
                Next::Read => {
                    self.held.keep();
                    return self.go_to(again(false));
                }
                Next::Undecided => return false,
                Next::Missing => {}
            }
        }
        let rest = self.held.rest();
        if format.begins.iter().any(|begin| rest.starts_with(begin)) {
            return self.leave_calls(after_call, emit);
        }
        if format.begins.iter().any(|begin| begin.starts_with(rest)) {
            return false;
        }
        match self.held.next_of(format.separators) {
            Next::Read => return self.go_to(again(true)),
            Next::Undecided => return false,
            Next::Missing => {}
        }
        let is_call = match format.call_begin {
            "" => !after_call || has_separator,
            marker => match self.held.next(marker) {
                Next::Read => true,
                Next::Undecided => return false,
                Next::Missing => false,
            },
        };
        match is_call {
            true => self.go_to(Stage::Call(Call::new(format, first))),
            false => self.leave_calls(after_call, emit),
        }
    }

    /// No call follows: what was kept is content.
    fn leave_calls(&mut self, after_call: bool, emit: Emit<'_>) -> bool {
        if after_call {
            self.held.rewind();
        } else {
            self.take_back(emit);
        }
        self.go_to(Stage::Content)
    }

    /// What was kept is content, though it looked like a call.
    fn take_back(&mut self, emit: Emit<'_>) {
        let num_bytes = self.held.mark();
        self.held.rewind();
        self.is_fresh = false;
        self.end_thoughts();
        self.show_text(num_bytes, emit);
        emit(Parsed::NoCall);
    }

    fn read_call(&mut self, emit: Emit<'_>) -> bool {
        let (Stage::Call(call), Some((_, tools))) = (&mut self.stage, &self.tools) else {
            return false;
        };
        let had_begun = call.has_begun();
        let mut reading = Reading {
            held: &mut self.held,
            tools,
            emit,
        };
        let progress = call.read(&mut reading);
        if !had_begun && call.has_begun() {
            self.text.cut();
        }
        match progress {
            Progress::More | Progress::Again => false,
            Progress::NoCall | Progress::Undeclared => {
                self.take_back(emit);
                self.go_to(Stage::Content)
            }
            Progress::Ended => {
                emit(Parsed::CallEnded);
                self.held.keep();
                self.go_to(Stage::Between {
                    after_call: true,
                    has_separator: false,
                })
            }
        }
    }
}
