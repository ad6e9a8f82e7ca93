//! One output's way from tokens to what a client may read.

use plait_core::TokenId;

use crate::detokenise::{Detokeniser, TextStyle};
use crate::output_parser::{Emit, OutputParser, Parsed, Parsing};
use crate::stop::StopScan;
use crate::vocabulary::{PieceKind, Vocabulary};

/// The index of the stop string that ended a text.
pub type StopString = usize;

/// Detokeniser, stop-string scan and parser of one output, in this order.
#[derive(Debug)]
pub struct OutputText {
    detokeniser: Detokeniser,
    scan: StopScan,
    /// `None` where all text is content.
    parser: Option<Box<OutputParser>>,
    /// Text of the tokens just decoded; kept for its buffer.
    piece: String,
    /// Text without a stop string; kept for its buffer.
    shown: String,
}

impl OutputText {
    /// An output without tokens.
    pub fn new(vocabulary: &Vocabulary, style: TextStyle, parsing: Parsing) -> Self {
        let parses = parsing.reasoning.is_some() || parsing.tools.is_some();
        Self {
            detokeniser: Detokeniser::new(vocabulary, style),
            scan: StopScan::new(style.shows_stop),
            parser: parses.then(|| Box::new(OutputParser::new(parsing))),
            piece: String::new(),
            shown: String::new(),
        }
    }

    /// Whether the output is within a thought.
    pub fn is_thinking(&self) -> bool {
        self.parser
            .as_ref()
            .is_some_and(|parser| parser.is_thinking())
    }

    /// Takes the next token and passes on what is certain now. `Some` is the stop string that was found: the
    /// output ends with it.
    pub fn push(
        &mut self,
        vocabulary: &Vocabulary,
        stops: &[String],
        token: TokenId,
        emit: Emit<'_>,
    ) -> Option<StopString> {
        let piece = vocabulary.piece(token);
        if piece.kind == PieceKind::Hidden && self.parser.is_some() {
            let special = String::from_utf8_lossy(piece.bytes);
            if self
                .parser
                .as_ref()
                .is_some_and(|parser| parser.reads(&special))
            {
                return self.push_marker(vocabulary, stops, &special, emit);
            }
        }
        self.detokeniser.push(vocabulary, token, &mut self.piece);
        self.pass_on(stops, emit)
    }

    /// No token follows: passes on what was held back, unless it completes a stop string.
    pub fn finish(
        &mut self,
        vocabulary: &Vocabulary,
        stops: &[String],
        emit: Emit<'_>,
    ) -> Option<StopString> {
        let stop = self.end_text(vocabulary, stops, emit);
        self.finish_parsing(emit);
        stop
    }

    /// A stop string was found: passes on what the parser held back.
    pub fn finish_parsing(&mut self, emit: Emit<'_>) {
        if let Some(parser) = &mut self.parser {
            parser.finish(emit);
        }
    }

    /// A special token that the parser reads: the text before it is complete.
    fn push_marker(
        &mut self,
        vocabulary: &Vocabulary,
        stops: &[String],
        special: &str,
        emit: Emit<'_>,
    ) -> Option<StopString> {
        let stop = self.end_text(vocabulary, stops, emit);
        if let (None, Some(parser)) = (stop, &mut self.parser) {
            parser.push(special, emit);
        }
        stop
    }

    fn end_text(
        &mut self,
        vocabulary: &Vocabulary,
        stops: &[String],
        emit: Emit<'_>,
    ) -> Option<StopString> {
        self.detokeniser.finish(vocabulary, &mut self.piece);
        let stop = self.pass_on(stops, emit);
        self.scan.finish(&mut self.shown);
        self.show(emit);
        stop
    }

    fn pass_on(&mut self, stops: &[String], emit: Emit<'_>) -> Option<StopString> {
        let stop = self.scan.push(stops, &self.piece, &mut self.shown);
        self.piece.clear();
        self.show(emit);
        stop
    }

    fn show(&mut self, emit: Emit<'_>) {
        if !self.shown.is_empty() {
            match &mut self.parser {
                Some(parser) => parser.push(&self.shown, emit),
                None => emit(Parsed::Text(&self.shown)),
            }
            self.shown.clear();
        }
    }
}
