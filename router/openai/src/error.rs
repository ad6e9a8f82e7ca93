//! What can be wrong with requests, and the errors that clients read.

use std::borrow::Cow;

use plait_core::Refusal;
use serde_json::json;

/// A request that cannot be served as it is (HTTP 400).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// The field of the request.
    pub param: Cow<'static, str>,
    /// A word for programs.
    pub code: &'static str,
    /// What was given, what is allowed, what to do.
    pub message: String,
}

impl RequestError {
    pub(crate) fn new(
        param: impl Into<Cow<'static, str>>,
        code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self {
            param: param.into(),
            code,
            message: message.into(),
        }
    }

    /// A value that is not allowed.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::new(param, "invalid_value", message)
    }
}

/// An error as OpenAI's API states it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// The Retry-After header; `None` leaves it out.
    pub retry_after_seconds: Option<u16>,
    /// What was given, what is allowed, what to do.
    pub message: String,
    /// OpenAI's class of error.
    pub kind: &'static str,
    /// The field at fault.
    pub param: Option<Cow<'static, str>>,
    /// A word for programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// The engine cannot serve this now: it loads, drains or failed (503).
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self {
            status: 503,
            retry_after_seconds: None,
            message: message.into(),
            kind: "service_unavailable",
            param: None,
            code: Some("service_unavailable"),
        }
    }

    /// A queue is full (429): the client may come again.
    pub fn overloaded(message: impl Into<String>) -> Self {
        Self {
            status: 429,
            retry_after_seconds: Some(1),
            message: message.into(),
            kind: "rate_limit_error",
            param: None,
            code: Some("queue_full"),
        }
    }

    /// It took longer than a request may (504); `what` says which limit was passed.
    pub fn deadline(what: impl Into<String>) -> Self {
        Self {
            retry_after_seconds: None,
            code: Some("deadline_exceeded"),
            ..Self::timed_out(what)
        }
    }

    /// An operator ended it (410, which clients do not try again by themselves).
    pub fn ended_by_operator() -> Self {
        Self {
            status: 410,
            retry_after_seconds: None,
            message: "the server's operator ended this request; ask the operator before you send it again"
                .to_owned(),
            kind: "request_ended",
            param: None,
            code: Some("ended_by_operator"),
        }
    }

    /// It waited too long in the queue (504): the client may come again.
    fn timed_out(message: impl Into<String>) -> Self {
        Self {
            status: 504,
            retry_after_seconds: Some(1),
            message: message.into(),
            kind: "timeout_error",
            param: None,
            code: Some("queue_timeout"),
        }
    }

    /// When the client may come again, if it may: in `seconds`, or at once.
    #[must_use]
    pub fn retry_after(mut self, seconds: u16) -> Self {
        if self.retry_after_seconds.is_some() {
            self.retry_after_seconds = Some(seconds.max(1));
        }
        self
    }

    /// A bug of ours (500).
    pub fn internal(message: impl Into<String>) -> Self {
        Self {
            status: 500,
            retry_after_seconds: None,
            message: message.into(),
            kind: "internal_error",
            param: None,
            code: Some("internal_error"),
        }
    }

    /// Workers were lost twice while they computed the request (500), so it is not tried a third time.
    pub fn took_workers_down() -> Self {
        Self {
            code: Some("took_workers_down"),
            ..Self::internal(
                "the server's workers were lost twice while they computed this request, and it is not tried again; the \
                 server's log says how they ended. Do not send it again before the cause is known",
            )
        }
    }

    /// The model computed NaN or infinity instead of logits (500).
    pub fn not_finite() -> Self {
        Self {
            code: Some("not_finite"),
            ..Self::internal(
                "the model computed NaN or infinity instead of logits for this request; other requests go on. If it \
                 happens again, the model's files are damaged, or its values overflow its type: the server's operator \
                 can download it again, or serve it with --dtype float32",
            )
        }
    }

    /// Appends the payload of an error record: u16 status, u16 Retry-After, JSON body.
    pub fn write_record(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.status.to_le_bytes());
        out.extend_from_slice(&self.retry_after_seconds.unwrap_or(0).to_le_bytes());
        out.extend_from_slice(self.body().as_bytes());
    }

    /// The JSON body.
    pub fn body(&self) -> String {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
        .to_string()
    }
}

impl ApiError {
    /// More `dimensions` than the model's vectors have.
    pub fn dimensions(asked: Option<u32>, num_elements: usize) -> Self {
        let asked = asked.unwrap_or_default();
        Self::from(RequestError::invalid(
            "dimensions",
            format!(
                "`dimensions` is {asked}, where 1 to {num_elements} are allowed; send that or leave it out"
            ),
        ))
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        Self {
            status: 400,
            retry_after_seconds: None,
            message: error.message,
            kind: "invalid_request_error",
            param: Some(error.param),
            code: Some(error.code),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::QueueFull { .. } | Refusal::QueueTokensFull { .. } | Refusal::Displaced => {
                Self::overloaded(message)
            }
            Refusal::Expired { .. } => Self::timed_out(message),
            Refusal::Draining => Self::unavailable(message),
            Refusal::EmptyPrompt => RequestError::invalid("prompt", message).into(),
            Refusal::TooLongForModel { .. } | Refusal::TooLongForPool { .. } => {
                RequestError::new("prompt", "context_length_exceeded", message).into()
            }
        }
    }
}
