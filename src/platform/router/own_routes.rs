//! The router's own routes as they are described.

use http::Method;
use serde_json::{Value, json};

use super::door::Door;
use super::own::{Act, Own};
use super::{account, sign_in};
use crate::http::openapi::{
    Answer, Content, Credential, Operation, Parameter, Place, Scheme, any_text, array, boolean, count,
    fields, matching, named, object, one_of, text, uuid,
};
use crate::http::problem::Code;
use crate::machine::name::Slot;
use crate::machine::state::Status;

const SESSION: Credential = Credential {
    name: "session",
    scheme: Scheme::Cookie("svc_session"),
    about: "A browser's session (svc_code_session on CODE_HOST; with the prefix __Host- over HTTPS), or the identity \
            provider's cookie __session.",
};
const USER: Credential =
    Credential { name: "user", scheme: Scheme::Bearer, about: "The identity provider's session JWT" };
const VISITORS: &[Credential] = &[SESSION, USER];

pub static LIST_SLOTS: Own = Own {
    operation: Operation {
        id: "listOwnSlots",
        method: Method::GET,
        path: "/_svc/slots",
        summary: "The slots of whoever asks, the oldest first; a page for browsers.",
        credentials: VISITORS,
        parameters: &[],
        body: None,
        answers: &[told(200, "The slots.", || object(&[("slots", array(named("OwnSlot")))], &[])), SIGN_IN],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    door: None,
    act: Act::ListSlots,
};

pub static CHOOSE_SLOT: Own = Own {
    operation: Operation {
        id: "chooseSlot",
        method: Method::POST,
        path: "/_svc/slots",
        summary: "Leads this browser's session to a slot.",
        credentials: VISITORS,
        parameters: &[],
        body: Some(|| fields(&[("slot", slot())], &[])),
        answers: &[
            told(200, "It does.", || object(&[("slot", slot())], &[])),
            Answer { status: 303, about: "To the slot, after a form.", content: Content::Nothing },
        ],
        problems: &[
            Code::Forbidden,
            Code::NotFound,
            Code::RateLimited,
            Code::Unavailable,
            Code::DatabaseUnavailable,
        ],
    },
    door: None,
    act: Act::ChooseSlot,
};

pub static CHOOSE_ACCOUNT: Own = Own {
    operation: Operation {
        id: "chooseAccount",
        method: Method::POST,
        path: account::PATH,
        summary: "Settles which account this browser uses, where its session and the identity provider disagree.",
        credentials: VISITORS,
        parameters: &[],
        body: Some(|| fields(&[("account", one_of(&account::Choice::NAMES))], &[("returnTo", any_text())])),
        answers: &[Answer {
            status: 303,
            about: "To `returnTo`, a path of this host; with the chosen account.",
            content: Content::Nothing,
        }],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    door: None,
    act: Act::ChooseAccount,
};

pub static MINT_APP_TOKEN: Own = Own {
    operation: Operation {
        id: "mintAppToken",
        method: Method::POST,
        path: "/_svc/app-token",
        summary: "A token for one app on the caller's machine; the app's frame renews its own by this.",
        credentials: VISITORS,
        parameters: &[],
        body: Some(|| fields(&[("app", matching("^[a-z][a-z0-9-]{0,40}$"))], &[])),
        answers: &[told(200, "The token.", || object(&[("token", text()), ("expiresAt", count())], &[]))],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    door: Some(Door::App),
    act: Act::MintAppToken,
};

pub static SIGN_OUT: Own = Own {
    operation: Operation {
        id: "signOut",
        method: Method::POST,
        path: "/_svc/sign-out",
        summary: "Ends the sessions of whoever asks, on both hosts, with their app tokens and open streams.",
        credentials: &[],
        parameters: &[],
        body: None,
        answers: &[Answer { status: 204, about: "They are ended.", content: Content::Nothing }],
        problems: &[
            Code::Unauthorized,
            Code::Forbidden,
            Code::RequestTooLarge,
            Code::RateLimited,
            Code::Unavailable,
            Code::DatabaseUnavailable,
        ],
    },
    door: None,
    act: Act::SignOut,
};

pub static HAND_OVER: Own = Own {
    operation: Operation {
        id: "handOverSession",
        method: Method::GET,
        path: sign_in::HAND_OVER,
        summary: "On APP_HOST: leads a browser back to CODE_HOST with a code that works once.",
        credentials: VISITORS,
        parameters: &[
            Parameter {
                name: "state",
                place: Place::QueryNeeded,
                schema: any_text,
                about: "The nonce that the browser holds on CODE_HOST.",
            },
            Parameter {
                name: "return_to",
                place: Place::Query,
                schema: any_text,
                about: "The path on CODE_HOST to end at; another host's is not gone to.",
            },
        ],
        body: None,
        answers: &[SIGN_IN],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    door: Some(Door::App),
    act: Act::HandOver,
};

pub static TAKE_SESSION: Own = Own {
    operation: Operation {
        id: "takeSession",
        method: Method::GET,
        path: sign_in::TAKE,
        summary: "On CODE_HOST: the code, with the browser's nonce, becomes a session.",
        credentials: &[],
        parameters: &[Parameter {
            name: "code",
            place: Place::QueryNeeded,
            schema: any_text,
            about: "The code, which works once.",
        }],
        body: None,
        answers: &[SIGN_IN],
        problems: &[Code::Unauthorized, Code::RequestTooLarge, Code::RateLimited, Code::DatabaseUnavailable],
    },
    door: Some(Door::Code),
    act: Act::TakeSession,
};

const SIGN_IN: Answer = Answer {
    status: 302,
    about: "Of a browser: to the next place of signing in, or to where it wanted to go.",
    content: Content::Nothing,
};

const fn told(status: u16, about: &'static str, schema: fn() -> Value) -> Answer {
    Answer { status, about, content: Content::Json(schema) }
}

fn slot() -> Value {
    json!({ "type": "string", "pattern": Slot::PATTERN })
}

/// Where the router is reached.
pub fn servers() -> Value {
    let host = json!({ "default": "app.example", "description": "APP_HOST or CODE_HOST" });
    json!([{ "url": "https://{host}", "variables": { "host": host } }])
}

/// A slot as its user sees it.
pub fn own_slot() -> Value {
    object(
        &[
            ("slot", slot()),
            ("handle", text()),
            ("machineId", uuid()),
            ("status", one_of(&Status::ALL.map(Status::as_str))),
            ("current", boolean()),
        ],
        &[],
    )
}
