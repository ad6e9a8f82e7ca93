//! Reads one tool call, whatever its family.

use super::format::{Syntax, ToolFormat};
use super::held::Held;
use super::named_call::NamedCall;
use super::object_call::ObjectCall;
use super::python_call::PythonCall;
use super::tagged_call::TaggedCall;
use super::tools::Tools;
use super::{Emit, Parsed};

/// How far reading came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// More text decides.
    More,
    /// Another part of the call can be read.
    Again,
    /// It is no call; nothing of it was passed on.
    NoCall,
    /// It names a tool that was not declared; nothing of it was passed on.
    Undeclared,
    /// It is complete.
    Ended,
}

/// A call that is being read.
#[derive(Debug)]
pub(super) enum Call {
    Object(ObjectCall),
    Named(NamedCall),
    Tagged(TaggedCall),
    Python(PythonCall),
}

/// What readers of calls need.
pub(super) struct Reading<'a, 'b> {
    pub(super) held: &'a mut Held,
    pub(super) tools: &'a Tools,
    pub(super) emit: Emit<'b>,
}

impl Call {
    /// A call of this family whose text begins with `first`.
    pub(super) fn new(format: &'static ToolFormat, first: u8) -> Self {
        match &format.syntax {
            Syntax::Object => Self::Object(ObjectCall::default()),
            Syntax::ObjectOrNamed(_) if first == b'{' => Self::Object(ObjectCall::default()),
            Syntax::Named(named) | Syntax::ObjectOrNamed(named) => {
                Self::Named(NamedCall::new(named, format.ends))
            }
            Syntax::Tagged(tags) => Self::Tagged(TaggedCall::new(tags)),
            Syntax::Python => Self::Python(PythonCall::default()),
        }
    }

    pub(super) fn read(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        loop {
            let progress = match self {
                Self::Object(call) => call.read(reading),
                Self::Named(call) => call.read(reading),
                Self::Tagged(call) => call.read(reading),
                Self::Python(call) => call.read(reading),
            };
            if progress != Progress::Again {
                return progress;
            }
        }
    }

    /// Whether it was passed on already.
    pub(super) fn has_begun(&self) -> bool {
        match self {
            Self::Object(call) => call.has_begun(),
            Self::Named(call) => call.has_begun(),
            Self::Tagged(call) => call.has_begun(),
            Self::Python(call) => call.has_begun(),
        }
    }

    /// No text follows: passes on what was held of the arguments.
    pub(super) fn finish(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        match self {
            Self::Object(call) if call.is_complete() => return Progress::Ended,
            Self::Named(call) if call.is_complete() => return Progress::Ended,
            Self::Tagged(call) => call.flush(reading),
            Self::Python(call) => call.flush(reading),
            Self::Object(_) | Self::Named(_) => {}
        }
        reading.arguments_rest();
        Progress::More
    }
}

impl Reading<'_, '_> {
    /// Passes on that a call of this tool begins: from now on nothing of it can be taken back.
    pub(super) fn begin(&mut self, name: &str, id: Option<&str>) {
        self.held.release();
        (self.emit)(Parsed::CallBegun { name, id });
    }

    pub(super) fn arguments(&mut self, piece: &str) {
        if !piece.is_empty() {
            (self.emit)(Parsed::Arguments(piece));
        }
    }

    /// Passes on the next bytes as they are.
    pub(super) fn arguments_as_they_are(&mut self, num_bytes: usize) {
        let piece = &self.held.rest()[..num_bytes];
        if !piece.is_empty() {
            (self.emit)(Parsed::Arguments(piece));
        }
        self.held.advance(num_bytes);
    }

    fn arguments_rest(&mut self) {
        self.arguments_as_they_are(self.held.rest().len());
    }
}
