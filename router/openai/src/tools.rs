//! The tools of a chat: what it declares, what may be called, and calls and results in its messages.

use std::collections::HashSet;
use std::sync::Arc;

use plait_grammar::{CompileError, Form, Limits, check_schema};
use plait_text::{Formats, Message, ReasoningFormat, ToolFormat, Tools};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::call_grammar::{CallForms, Callable};
use crate::error::RequestError;

const MAX_TOOLS: usize = 128;
const MAX_NAME_BYTES: usize = 64;

/// Tools of a chat, and which of them may be called.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct ToolFields {
    /// As `OpenAI` has them.
    pub tools: Vec<Map<String, Value>>,
    /// Which of them may be called.
    pub tool_choice: ToolChoice,
    /// The answer ends after one call.
    pub single_call: bool,
    /// They came as `functions`, the older name, and so calls leave as `function_call`.
    pub are_functions: bool,
}

/// Which tools may be called, and whether one must be.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct ToolChoice {
    /// None, some or at least one.
    pub mode: ToolMode,
    /// Only these; None: all.
    pub names: Option<Vec<String>>,
}

/// Whether the model calls tools.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ToolMode {
    /// It is told of none.
    None,
    /// As it likes.
    #[default]
    Auto,
    /// One or more.
    Required,
    /// The one tool that is named.
    Named,
}

impl ToolFields {
    /// The name under which the client gave the tools.
    pub(crate) fn param(&self) -> &'static str {
        match self.are_functions {
            true => "functions",
            false => "tools",
        }
    }

    /// Whether the model is told of tools.
    pub(crate) fn are_offered(&self) -> bool {
        !self.tools.is_empty() && self.tool_choice.mode != ToolMode::None
    }

    /// The tools that the template shows.
    pub(crate) fn offered(&self) -> Vec<Value> {
        match self.are_offered() {
            true => self.tools.iter().cloned().map(Value::Object).collect(),
            false => Vec::new(),
        }
    }

    /// Whether the answer is at least one call.
    pub(crate) fn are_required(&self) -> bool {
        matches!(self.tool_choice.mode, ToolMode::Required | ToolMode::Named)
    }

    /// Whether the answer ends after one call.
    pub(crate) fn end_after_one(&self) -> bool {
        self.single_call || self.are_functions || self.tool_choice.mode == ToolMode::Named
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let functions = self.tools.iter().map(|tool| &tool["function"]);
        functions.filter_map(|function| function["name"].as_str())
    }

    fn may_be_called(&self, name: &str) -> bool {
        let names = self.tool_choice.names.as_deref();
        names.is_none_or(|names| names.iter().any(|it| it == name))
    }

    /// How calls are found in the answer, if it may have some; an error if this model's calls are unknown.
    pub(crate) fn parsed_as(
        &self,
        formats: Formats,
    ) -> Result<Option<(&'static ToolFormat, Arc<Tools>)>, RequestError> {
        if !self.are_offered() {
            return Ok(None);
        }
        let Some(format) = formats.tools else {
            let message = format!(
                "`{}` is given, and this model's chat template shows no way of calling tools that is known; leave it \
                 out, send `tool_choice`: \"none\", or start the server with --tool-parser",
                self.param()
            );
            return Err(RequestError::new(
                self.param(),
                "unsupported_value",
                message,
            ));
        };
        let functions = self
            .tools
            .iter()
            .filter_map(|tool| tool["function"].as_object());
        let callable = functions.filter_map(|function| {
            let name = function.get("name")?.as_str()?;
            let schema = function.get("parameters").cloned().unwrap_or_default();
            self.may_be_called(name).then(|| (name.to_owned(), schema))
        });
        Ok(Some((format, Arc::new(Tools::new(callable)))))
    }
}

impl ToolFields {
    /// What the answer's calls must be, if anything: some must come, or some tool is strict.
    pub(crate) fn held_to(
        &self,
        format: &'static ToolFormat,
        tools: &Tools,
    ) -> Result<Option<Form>, RequestError> {
        let functions = self.tools.iter().map(|tool| &tool["function"]);
        let callables = functions.enumerate().filter_map(|(index, function)| {
            let callable = Callable {
                name: function["name"].as_str()?,
                parameters: function.get("parameters").and_then(Value::as_object),
                is_held: self.are_required() || function["strict"] == true,
            };
            self.may_be_called(callable.name)
                .then_some((index, callable))
        });
        let (indexes, callables): (Vec<usize>, Vec<Callable<'_>>) = callables.unzip();
        if !callables.iter().any(|it| it.is_held) {
            return Ok(None);
        }
        for (index, callable) in indexes.iter().zip(&callables) {
            self.check_parameters(*index, callable)?;
        }
        let forms = CallForms::new(format, tools, self.end_after_one());
        let form = match self.are_required() {
            true => forms.required(&callables),
            false => forms.in_text(&callables),
        };
        form.map(Some)
            .map_err(|(index, why)| self.cannot_be_held(indexes[index], &why))
    }

    fn check_parameters(&self, index: usize, callable: &Callable<'_>) -> Result<(), RequestError> {
        let Some(parameters) = callable.parameters.filter(|_| callable.is_held) else {
            return Ok(());
        };
        let text = Value::Object(parameters.clone()).to_string();
        check_schema(&text, &Limits::default()).map_err(|error| {
            let param = self.parameters_param(index);
            let code = match error {
                CompileError::Unsupported { .. } => "unsupported_value",
                CompileError::TooLarge { .. } => "constraint_too_large",
                _ => "invalid_value",
            };
            let message = format!("`{param}` {error}");
            RequestError::new(param, code, message)
        })
    }

    fn parameters_param(&self, index: usize) -> String {
        match self.are_functions {
            true => format!("functions[{index}].parameters"),
            false => format!("tools[{index}].function.parameters"),
        }
    }

    fn cannot_be_held(&self, index: usize, why: &str) -> RequestError {
        let param = self.parameters_param(index);
        let instead = match self.are_required() {
            true => "send `tool_choice`: \"auto\"",
            false => "leave out `strict`",
        };
        let message = format!(
            "`{param}` has {why}, which calls as this model writes them cannot be held to; say it in other words, or \
             {instead}"
        );
        RequestError::new(param, "unsupported_value", message)
    }
}

/// Checks the tools, what may be called, and what the messages say of calls.
pub(crate) fn check(fields: &ToolFields, messages: &[Message]) -> Result<(), RequestError> {
    check_tools(fields)?;
    check_choice(fields)?;
    check_messages(messages)
}

fn check_tools(fields: &ToolFields) -> Result<(), RequestError> {
    let param = fields.param();
    let num_tools = fields.tools.len();
    if num_tools > MAX_TOOLS {
        let message = format!(
            "`{param}` has {num_tools} tools, where 0 to {MAX_TOOLS} are allowed; send fewer"
        );
        return Err(RequestError::invalid(param, message));
    }
    for (index, tool) in fields.tools.iter().enumerate() {
        check_tool(param, index, tool)?;
        let name = &tool["function"]["name"];
        let same = |other: &&Map<String, Value>| other["function"]["name"] == *name;
        if fields.tools[..index].iter().any(|other| same(&other)) {
            let message = format!(
                "`{param}[{index}]` has the name {name} of another tool; send each name once"
            );
            return Err(RequestError::invalid(param, message));
        }
    }
    Ok(())
}

fn check_tool(param: &str, index: usize, tool: &Map<String, Value>) -> Result<(), RequestError> {
    let at = format!("{param}[{index}]");
    if tool.get("type").is_some_and(|kind| kind != "function") {
        let message = format!(
            "`{at}.type` is {}, where \"function\" is allowed; leave this tool out",
            shown(&tool["type"])
        );
        return Err(RequestError::new(
            format!("{at}.type"),
            "unsupported_value",
            message,
        ));
    }
    let Some(function) = tool.get("function").and_then(Value::as_object) else {
        let message = format!("`{at}.function` is missing; send an object with a `name`");
        return Err(RequestError::invalid(format!("{at}.function"), message));
    };
    let name = function
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !is_name(name) {
        let given = function
            .get("name")
            .map_or_else(|| "missing".to_owned(), shown);
        let message = format!(
            "`{at}.function.name` is {given}, where 1 to {MAX_NAME_BYTES} letters, digits, `_`, `-` and `.` are \
             allowed; rename the tool"
        );
        return Err(RequestError::invalid(
            format!("{at}.function.name"),
            message,
        ));
    }
    match function.get("parameters") {
        None | Some(Value::Null | Value::Object(_)) => Ok(()),
        Some(other) => {
            let message = format!(
                "`{at}.function.parameters` is {}, where a JSON Schema (an object) is allowed; send one or leave it out",
                shown(other)
            );
            Err(RequestError::invalid(
                format!("{at}.function.parameters"),
                message,
            ))
        }
    }
}

fn is_name(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_part)
}

/// The beginning of a value, for errors.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(64).collect()
}

fn check_choice(fields: &ToolFields) -> Result<(), RequestError> {
    let param = match fields.are_functions {
        true => "function_call",
        false => "tool_choice",
    };
    if fields.are_required() && fields.tools.is_empty() {
        let message = format!(
            "`{param}` asks for a call without `{}`; send some, or leave it out",
            fields.param()
        );
        return Err(RequestError::invalid(param, message));
    }
    let Some(names) = &fields.tool_choice.names else {
        return Ok(());
    };
    if fields.are_required() && names.is_empty() {
        let message = format!("`{param}` asks for a call and allows no tool; name one or more");
        return Err(RequestError::invalid(param, message));
    }
    match names
        .iter()
        .find(|name| !fields.names().any(|it| it == *name))
    {
        None => Ok(()),
        Some(name) => {
            let name: String = name.chars().take(MAX_NAME_BYTES).collect();
            let message = format!(
                "`{param}` names the tool {name:?}, which `{}` does not have; send it there or name another",
                fields.param()
            );
            Err(RequestError::invalid(param, message))
        }
    }
}

/// Arguments are JSON objects, and results follow calls.
fn check_messages(messages: &[Message]) -> Result<(), RequestError> {
    let mut open: Option<HashSet<&str>> = None;
    for (index, message) in messages.iter().enumerate() {
        let calls = message.get("tool_calls").and_then(Value::as_array);
        match message.get("role").and_then(Value::as_str) {
            Some("tool") => check_result(index, message, open.as_ref())?,
            _ => {
                open = calls
                    .filter(|calls| !calls.is_empty())
                    .map(|calls| ids_of(calls));
            }
        }
        for (at, call) in calls.into_iter().flatten().enumerate() {
            check_arguments(&format!("messages[{index}].tool_calls[{at}]"), call)?;
        }
    }
    Ok(())
}

fn ids_of(calls: &[Value]) -> HashSet<&str> {
    calls
        .iter()
        .filter_map(|call| call["id"].as_str())
        .collect()
}

/// `open` has the ids of the calls before it.
fn check_result(
    index: usize,
    message: &Message,
    open: Option<&HashSet<&str>>,
) -> Result<(), RequestError> {
    let Some(ids) = open else {
        let text = format!(
            "`messages[{index}]` is a tool's result, and no message with `tool_calls` comes before it; send the \
             assistant's call too, or leave the result out"
        );
        return Err(RequestError::invalid(format!("messages[{index}]"), text));
    };
    let Some(id) = message.get("tool_call_id").and_then(Value::as_str) else {
        return Ok(());
    };
    if ids.is_empty() || ids.contains(id) {
        return Ok(());
    }
    let param = format!("messages[{index}].tool_call_id");
    let shown: String = id.chars().take(64).collect();
    let text = format!(
        "`{param}` is {shown:?}, which no call of the message before has; send the id of one of its calls"
    );
    Err(RequestError::invalid(param, text))
}

fn check_arguments(at: &str, call: &Value) -> Result<(), RequestError> {
    let arguments = match call.get("function") {
        Some(function) => &function["arguments"],
        None => &call["arguments"],
    };
    let is_object = match arguments {
        Value::Null | Value::Object(_) => true,
        Value::String(text) if text.trim().is_empty() => true,
        Value::String(text) => serde_json::from_str::<Map<String, Value>>(text).is_ok(),
        _ => false,
    };
    if is_object {
        return Ok(());
    }
    let param = format!("{at}.function.arguments");
    let message = format!(
        "`{param}` is {}, which is no JSON object; send the arguments as one",
        shown(arguments)
    );
    Err(RequestError::invalid(param, message))
}

/// Where an answer's thought may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThoughtPlace {
    /// The prompt ends within it.
    Open,
    /// The model may begin one.
    First,
    /// There is none.
    Nowhere,
}

/// Where the answer to this prompt has its thought; `continued` is the text that it continues.
pub(crate) fn thought_place(
    format: Option<&'static ReasoningFormat>,
    prompt: &str,
    continued: Option<&str>,
) -> ThoughtPlace {
    let Some(format) = format else {
        return ThoughtPlace::Nowhere;
    };
    let is_open = match continued {
        None => prompt.trim_end().ends_with(format.open),
        Some(text) => match (text.rfind(format.open), text.rfind(format.close)) {
            (Some(open), close) => close.is_none_or(|close| close < open),
            (None, _) => false,
        },
    };
    match is_open {
        true => ThoughtPlace::Open,
        false if continued.is_some() || prompt.trim_end().ends_with(format.close) => {
            ThoughtPlace::Nowhere
        }
        false => ThoughtPlace::First,
    }
}
