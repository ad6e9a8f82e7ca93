//! Any message.

use serde::{Deserialize, Serialize};

use crate::control::{
    Bye, Decision, Drain, Fail, ForwardDone, Heartbeat, Hello, Join, StoreReply, StoreRequest,
    Vote, Welcome,
};
use crate::kind::Kind;
use crate::plan::Plan;
use crate::result::StepResult;
use crate::step_masks::StepMasks;

/// Any message. Where a variant is renamed, the golden files keep the name of the first release.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
#[allow(missing_docs, reason = "each variant is the message of its name")]
pub enum Message {
    Hello(Hello),
    Welcome(Welcome),
    Plan(Plan),
    StepResult(StepResult),
    Vote(Vote),
    #[serde(rename = "Verdict")]
    Decision(Decision),
    Drain(Drain),
    #[serde(rename = "Beat")]
    Heartbeat(Heartbeat),
    Fail(Fail),
    Bye(Bye),
    Join(Join),
    StoreRequest(StoreRequest),
    StoreReply(StoreReply),
    StepMasks(StepMasks),
    ForwardDone(ForwardDone),
}

impl Message {
    /// What frame 0 says.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Welcome(_) => Kind::Welcome,
            Self::Plan(_) => Kind::Plan,
            Self::StepResult(_) => Kind::StepResult,
            Self::Vote(_) => Kind::Vote,
            Self::Decision(_) => Kind::Decision,
            Self::Drain(_) => Kind::Drain,
            Self::Heartbeat(_) => Kind::Heartbeat,
            Self::Fail(_) => Kind::Fail,
            Self::Bye(_) => Kind::Bye,
            Self::Join(_) => Kind::Join,
            Self::StoreRequest(_) => Kind::StoreRequest,
            Self::StoreReply(_) => Kind::StoreReply,
            Self::StepMasks(_) => Kind::StepMasks,
            Self::ForwardDone(_) => Kind::ForwardDone,
        }
    }
}

macro_rules! into_message {
    ($($kind:ident)*) => {$(
        impl From<$kind> for Message {
            fn from(message: $kind) -> Self {
                Self::$kind(message)
            }
        }
    )*};
}
into_message!(Hello Welcome Plan StepResult Vote Decision Drain Heartbeat Fail Bye Join);
into_message!(StoreRequest StoreReply StepMasks ForwardDone);
