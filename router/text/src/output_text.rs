//! One output's way from tokens to the text that a client may read.

use plait_core::TokenId;

use crate::detokenise::{Detokeniser, TextStyle};
use crate::output_parser::{OutputParser, ParsedOutput};
use crate::stop::StopScan;
use crate::vocabulary::Vocabulary;

/// The index of the stop string that ended a text.
pub type StopString = usize;

/// Parser, detokeniser and stop-string scan of one output, in this order.
#[derive(Debug)]
pub struct OutputText {
    parser: Box<dyn OutputParser>,
    content: Content,
}

/// The answer's text channel.
#[derive(Debug)]
struct Content {
    detokeniser: Detokeniser,
    scan: StopScan,
    /// Text of the tokens just parsed; kept for its buffer.
    piece: String,
}

impl OutputText {
    /// An output without tokens.
    pub fn new(vocabulary: &Vocabulary, style: TextStyle, parser: Box<dyn OutputParser>) -> Self {
        Self {
            parser,
            content: Content {
                detokeniser: Detokeniser::new(vocabulary, style),
                scan: StopScan::new(style.shows_stop),
                piece: String::new(),
            },
        }
    }

    /// Takes the next token and appends the text that is certain now. `Some` is the stop string that
    /// was found: the text ends with it.
    pub fn push(
        &mut self,
        vocabulary: &Vocabulary,
        stops: &[String],
        token: TokenId,
        shown: &mut String,
    ) -> Option<StopString> {
        let Self { parser, content } = self;
        parser.push(token, vocabulary.piece(token), &mut |output| {
            content.take(vocabulary, output);
        });
        content.scan(stops, shown)
    }

    /// No token follows: appends what was held back, unless it completes a stop string.
    pub fn finish(
        &mut self,
        vocabulary: &Vocabulary,
        stops: &[String],
        shown: &mut String,
    ) -> Option<StopString> {
        let Self { parser, content } = self;
        parser.finish(&mut |output| content.take(vocabulary, output));
        content.detokeniser.finish(vocabulary, &mut content.piece);
        let stop = content.scan(stops, shown);
        content.scan.finish(shown);
        stop
    }
}

impl Content {
    fn take(&mut self, vocabulary: &Vocabulary, output: ParsedOutput) {
        let ParsedOutput::Content(token) = output;
        self.detokeniser.push(vocabulary, token, &mut self.piece);
    }

    fn scan(&mut self, stops: &[String], shown: &mut String) -> Option<StopString> {
        let stop = self.scan.push(stops, &self.piece, shown);
        self.piece.clear();
        stop
    }
}
