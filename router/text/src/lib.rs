//! Text around a model: chat template and tokenizer on the way in; output parser, detokeniser and
//! stop strings on the way out.
//!
//! [`ModelText`] holds what a model's files say about text and is shared by all threads.
//! [`OutputText`] turns one output's tokens into text. HTTP and OpenAI's API are `plait-openai`'s.

mod catch_panic;
mod detokenise;
mod error;
mod gguf;
mod gguf_model;
mod gguf_tokenizer;
mod hf_folder;
mod model;
mod model_files;
mod output_parser;
mod output_text;
mod post_processor;
mod python_json;
mod sampling;
mod stop;
mod template;
mod text_encoder;
mod vocabulary;

pub use detokenise::{TextStart, TextStyle};
pub use error::ModelFilesError;
pub use model::{ChosenFormats, Formats, ModelText};
pub use output_parser::{
    Accepts, ArgumentsWriting, CallIds, Emit, Kind, NameEnd, OutputParser, Parsed, Parsing,
    ReasoningFormat, TaggedWriting, ToolFormat, Tools, Writing,
};
pub use output_text::{OutputText, StopString};
pub use sampling::{OutOfRange, Penalties, SamplingFields};
pub use template::{Chat, Message, RESERVED_NAMES, RenderError};
pub use text_encoder::EncodeError;
pub use vocabulary::{Piece, PieceKind, Vocabulary};
