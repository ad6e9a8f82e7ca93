//! Chat templates: Jinja as transformers runs it, bounded in time and size.

use std::borrow::Cow;
use std::io;

use chrono::Local;
use chrono::format::{Item, StrftimeItems};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Map;

use crate::catch_panic::catch_panic;
use crate::python_json::{Style, dumps};

const NAME: &str = "chat_template";
/// The template for chats with tools, where a model has one of its own for them.
const TOOLS_NAME: &str = "tool_use";
/// Instructions that a template may run, plus some for each message. They take a few hundred milliseconds.
const FUEL: u64 = 2_000_000;
const FUEL_PER_MESSAGE: u64 = 10_000;
/// Names under which clients send earlier reasoning, the usual one first.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Names that templates read for how much a model thinks.
const EFFORT_SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];
/// Marks the end of a message that is to be continued. The space at its end shows whether the template trims texts.
const CONTINUED_HERE: &str = "[[the answer goes on here]] ";
/// Variables of the template that only the server sets.
pub const RESERVED_NAMES: [&str; 13] = [
    "messages",
    "tools",
    "documents",
    "tokenize",
    "chat_template",
    "raise_exception",
    "strftime_now",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
];

/// A message of a chat.
pub type Message = Map<String, serde_json::Value>;

/// Texts of the tokens that templates name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpecialTokens {
    pub(crate) bos: Option<String>,
    pub(crate) eos: Option<String>,
    pub(crate) pad: Option<String>,
    pub(crate) unk: Option<String>,
}

impl SpecialTokens {
    /// By the names that templates have for them.
    pub(crate) fn named(&self) -> [(&'static str, Option<&str>); 4] {
        [
            ("bos_token", self.bos.as_deref()),
            ("eos_token", self.eos.as_deref()),
            ("pad_token", self.pad.as_deref()),
            ("unk_token", self.unk.as_deref()),
        ]
    }
}

/// A model's chat template.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    /// Variables that a chat may replace.
    kwargs: Map<String, serde_json::Value>,
    has_tools_template: bool,
    source: String,
}

/// How the arguments of earlier calls reach a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentsAs {
    /// For templates that write `arguments | tojson`, or go through them.
    Object,
    /// For templates that add them to a text.
    Text,
}

/// A chat to be rendered.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// At least one.
    pub messages: &'a [Message],
    /// Tools that the model may call, as `OpenAI` has them.
    pub tools: &'a [serde_json::Value],
    /// Texts to answer from, for templates that know them.
    pub documents: &'a [serde_json::Value],
    /// More variables for the template.
    pub kwargs: &'a Map<String, serde_json::Value>,
    /// End the prompt where the assistant's turn begins.
    pub add_generation_prompt: bool,
    /// Leave the last message open, so that the answer continues it.
    pub continue_final_message: bool,
    /// How much the model should think; `none` not at all.
    pub reasoning_effort: Option<&'a str>,
}

/// Why a chat has no text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenderError {
    /// The model has no chat template.
    NoTemplate,
    /// The text has more bytes than allowed.
    TooLong,
    /// The last message is not in the text, so it cannot be continued.
    LastMessageLost,
    /// The template rejected the chat, or failed.
    Failed(String),
}

impl ChatTemplate {
    /// Compiles the template; the error says what is wrong with it.
    pub(crate) fn new(source: &str, special: SpecialTokens) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_syntax(syntax());
        environment.set_unknown_method_callback(python_method);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| {
                format!(
                    "has a chat template that is broken: {}",
                    describe_error(&error)
                )
            })?;
        Ok(Self {
            environment,
            special,
            kwargs: Map::new(),
            has_tools_template: false,
            source: source.to_owned(),
        })
    }

    /// The template with another for chats with tools; the error says what is wrong with that.
    pub(crate) fn with_tools_template(mut self, source: &str) -> Result<Self, String> {
        let added = self
            .environment
            .add_template_owned(TOOLS_NAME, without_generation_tags(source));
        added.map_err(|error| {
            let problem = describe_error(&error);
            format!("has a chat template for tools that is broken: {problem}")
        })?;
        self.has_tools_template = true;
        Ok(self)
    }

    /// The text that it was made of.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    pub(crate) fn set_kwargs(&mut self, kwargs: Map<String, serde_json::Value>) {
        self.kwargs = kwargs;
    }

    /// The chat's text, of at most `max_bytes`.
    pub(crate) fn render(&self, chat: Chat<'_>, max_bytes: usize) -> Result<String, RenderError> {
        if !chat.continue_final_message {
            return self.render_closed(chat, max_bytes);
        }
        let mut messages = chat.messages.to_vec();
        let Some(content) = messages.last_mut().and_then(|it| it.get_mut("content")) else {
            return Err(RenderError::LastMessageLost);
        };
        let last = content.as_str().unwrap_or_default().to_owned();
        *content = format!("{last}{CONTINUED_HERE}").into();
        let open = Chat {
            messages: &messages,
            ..chat
        };
        let text = self.render_closed(open, max_bytes.saturating_add(CONTINUED_HERE.len()))?;
        cut_after_last_message(text, &last).ok_or(RenderError::LastMessageLost)
    }

    fn render_closed(&self, chat: Chat<'_>, max_bytes: usize) -> Result<String, RenderError> {
        let rendered = self.render_with(chat, ArgumentsAs::Object, max_bytes);
        let has_calls = chat.messages.iter().any(|it| it.contains_key("tool_calls"));
        match rendered {
            Err(RenderError::Failed(_)) if has_calls => self
                .render_with(chat, ArgumentsAs::Text, max_bytes)
                .or(rendered),
            rendered => rendered,
        }
    }

    fn render_with(
        &self,
        chat: Chat<'_>,
        arguments: ArgumentsAs,
        max_bytes: usize,
    ) -> Result<String, RenderError> {
        let context = self.context(chat, arguments);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(FUEL + FUEL_PER_MESSAGE * chat.messages.len() as u64));
        let mut text = BoundedText {
            bytes: Vec::new(),
            max_bytes,
            is_full: false,
        };
        let name = match self.has_tools_template && !chat.tools.is_empty() {
            true => TOOLS_NAME,
            false => NAME,
        };
        let rendered = catch_panic(|| {
            let template = environment.get_template(name)?;
            template.render_captured_to(context, &mut text).map(drop)
        });
        match rendered {
            Some(Ok(())) => Ok(String::from_utf8(text.bytes).expect("templates write text")),
            Some(Err(_)) if text.is_full => Err(RenderError::TooLong),
            Some(Err(error)) => Err(RenderError::Failed(describe_error(&error))),
            None => Err(RenderError::Failed("it cannot render them".to_owned())),
        }
    }

    fn context(&self, chat: Chat<'_>, arguments: ArgumentsAs) -> Value {
        let messages = chat.messages.iter().map(with_reasoning);
        let messages: Vec<_> = messages
            .map(|message| with_arguments(message, arguments))
            .collect();
        let special = self.special.named().into_iter();
        let special = special.filter_map(|(name, text)| Some((name.to_owned(), text?.into())));
        let given = |kwargs: &Map<String, serde_json::Value>| {
            let pairs = kwargs.iter();
            let pairs = pairs.map(|(name, value)| (name.clone(), Serde(value.clone()).into()));
            pairs.collect::<Vec<(String, Value)>>()
        };
        let fixed = [
            ("messages", Serde(messages).into()),
            ("tools", list_or_none(chat.tools)),
            ("documents", list_or_none(chat.documents)),
            ("add_generation_prompt", chat.add_generation_prompt.into()),
        ];
        let fixed = fixed
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        let pairs = special
            .chain(given(&self.kwargs))
            .chain(effort(chat.reasoning_effort))
            .chain(given(chat.kwargs));
        Value::from_pairs(pairs.chain(fixed))
    }
}

/// The values, or None where there are none: templates ask `if tools`, or `if tools is not none`.
fn list_or_none(values: &[serde_json::Value]) -> Value {
    match values {
        [] => Value::from(()),
        values => Serde(values.to_vec()).into(),
    }
}

/// The effort under each name that some template reads; the others see nothing of it.
fn effort(effort: Option<&str>) -> impl Iterator<Item = (String, Value)> {
    effort.into_iter().flat_map(|effort| {
        let thinks = effort != "none";
        let switches = EFFORT_SWITCHES.map(|name| (name.to_owned(), thinks.into()));
        [("reasoning_effort".to_owned(), effort.into())]
            .into_iter()
            .chain(switches)
    })
}

/// The text up to the end of its last message, which is marked; `None` if it is not there.
fn cut_after_last_message(mut text: String, last: &str) -> Option<String> {
    let mark = CONTINUED_HERE.trim_end();
    let end = text.rfind(mark)?;
    let is_trimmed = !text[end..].starts_with(CONTINUED_HERE);
    text.truncate(end);
    let trailing = &last[last.trim_end().len()..];
    if is_trimmed && text.ends_with(trailing) {
        text.truncate(end - trailing.len());
    }
    Some(text)
}

/// The message with its reasoning under each name that templates read, as transformers does it.
fn with_reasoning(message: &Message) -> Cow<'_, Message> {
    let mut fields = REASONING_FIELDS
        .iter()
        .filter_map(|name| message.get(*name));
    let Some(reasoning) = fields.find(|reasoning| !reasoning.is_null()) else {
        return Cow::Borrowed(message);
    };
    let mut aliased = Message::new();
    aliased.insert("thinking".to_owned(), reasoning.clone());
    aliased.extend(message.clone());
    aliased.insert("reasoning_content".to_owned(), reasoning.clone());
    Cow::Owned(aliased)
}

/// The message with the arguments of its calls in this form; `OpenAI`'s clients send them as texts.
fn with_arguments(message: Cow<'_, Message>, form: ArgumentsAs) -> Cow<'_, Message> {
    if !message.contains_key("tool_calls") {
        return message;
    }
    let mut message = message.into_owned();
    let calls = message.get_mut("tool_calls");
    for call in calls.and_then(|it| it.as_array_mut()).into_iter().flatten() {
        let call = match call.get_mut("function") {
            Some(function) => function,
            None => call,
        };
        if let Some(arguments) = call.get_mut("arguments") {
            convert(arguments, form);
        }
    }
    Cow::Owned(message)
}

fn convert(arguments: &mut serde_json::Value, form: ArgumentsAs) {
    match (form, &*arguments) {
        (ArgumentsAs::Object, serde_json::Value::String(text)) => {
            let text = if text.trim().is_empty() { "{}" } else { text };
            if let Ok(object) = serde_json::from_str::<Message>(text) {
                *arguments = object.into();
            }
        }
        (ArgumentsAs::Text, serde_json::Value::Object(_)) => {
            *arguments = dumps(arguments, &Style::default()).into();
        }
        _ => {}
    }
}

/// Whitespace as transformers treats it.
fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("the default delimiters differ")
}

/// Text of at most `max_bytes`.
struct BoundedText {
    bytes: Vec<u8>,
    max_bytes: usize,
    is_full: bool,
}

impl io::Write for BoundedText {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + piece.len() > self.max_bytes {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `json.dumps` with the arguments that transformers lets templates set.
#[expect(
    clippy::needless_pass_by_value,
    reason = "minijinja's filters take Kwargs so"
)]
fn to_json(value: &Value, ensure_ascii: Option<bool>, kwargs: Kwargs) -> Result<String, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(width) if width.is_number() => Some(" ".repeat(usize::try_from(width)?.min(16))),
        Some(text) => Some(text.to_string()),
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let default_item = if indent.is_some() { "," } else { ", " };
    let [item_separator, key_separator] = match separators.map(TryFrom::try_from) {
        None => [default_item.to_owned(), ": ".to_owned()],
        Some(Ok(pair)) => pair,
        Some(Err(_)) => {
            let problem = "tojson takes two separators: between items and after keys";
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    };
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.or(ensure_ascii);
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    let style = Style {
        ensure_ascii: ensure_ascii.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: sort_keys.unwrap_or(false),
    };
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(dumps(&json, &style))
}

/// Python's methods. `title` is ours: minijinja's ends words at white space only.
fn python_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), method, arguments) {
        (Some(text), "title", []) => Ok(title(text).into()),
        _ => unknown_method_callback(state, value, method, arguments),
    }
}

fn title(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for letter in text.chars() {
        if in_word {
            titled.extend(letter.to_lowercase());
        } else {
            titled.extend(letter.to_uppercase());
        }
        in_word = letter.is_alphabetic();
    }
    titled
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        let problem = format!("`{format}` is not a format of dates");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    Ok(Local::now().format_with_items(items.iter()).to_string())
}

/// `{% generation %}` marks the assistant's text for training. Here it has no effect.
fn without_generation_tags(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let length = tag.find("%}").unwrap_or(tag.len());
        let (tag, after) = tag.split_at(length);
        plain.push_str(before);
        let word = tag["{%".len()..]
            .trim_matches(|letter: char| "+-".contains(letter) || letter.is_whitespace());
        plain.push_str(&match word {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.to_owned(),
        });
        rest = after;
    }
    plain.push_str(rest);
    plain
}

/// What went wrong, in the template's own words if it has some.
fn describe_error(error: &Error) -> String {
    match (error.kind(), error.detail(), error.line()) {
        (ErrorKind::OutOfFuel, _, _) => "it runs too long".to_owned(),
        (ErrorKind::InvalidOperation, Some(detail), _) => detail.to_owned(),
        (kind, detail, line) => {
            let detail = detail.map_or_else(String::new, |detail| format!(": {detail}"));
            let line = line.map_or_else(String::new, |line| format!(" (line {line})"));
            format!("{kind}{detail}{line}")
        }
    }
}
