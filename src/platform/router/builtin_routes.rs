//! Describes the router's built-in routes.

use http::Method;
use serde_json::{Value, json};

use super::{account, sign_in};
use crate::public_host::PublicHost;
use svc_http::openapi::{
    Content, Credential, CredentialScheme, DocumentedResponse, Operation, Parameter, ParameterLocation,
    array, boolean, count, nul_free_text, object, request_object, schema_ref, string_enum, text,
    text_matching, uuid,
};
use svc_http::problem::Code;
use svc_machine::name::Slot;
use svc_machine::state::Status;

/// A route that the router serves itself.
pub struct BuiltinRoute {
    pub operation: Operation,
    /// `None` means both hosts.
    pub(super) host: Option<PublicHost>,
    pub(super) action: BuiltinAction,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum BuiltinAction {
    ListSlots,
    ChooseSlot,
    ChooseAccount,
    SignOut,
    IssueCode,
    RedeemCode,
    MintAppToken,
}

impl BuiltinRoute {
    /// Returns the methods that the route accepts. HEAD is accepted only by the GET route without side effects: the
    /// other GET routes issue or redeem a code.
    pub(super) fn methods(&self) -> impl Iterator<Item = &str> {
        let head = matches!(self.action, BuiltinAction::ListSlots).then_some("HEAD");
        std::iter::once(self.operation.method.as_str()).chain(head)
    }

    pub(super) fn accepts(&self, method: &Method) -> bool {
        self.methods().any(|accepted| accepted == method.as_str())
    }
}

pub static ROUTES: [&BuiltinRoute; 7] =
    [&LIST_SLOTS, &CHOOSE_SLOT, &CHOOSE_ACCOUNT, &MINT_APP_TOKEN, &SIGN_OUT, &ISSUE_CODE, &REDEEM_CODE];

const SESSION: Credential = Credential {
    name: "session",
    scheme: CredentialScheme::Cookie("svc_session"),
    description: "A browser's session (svc_code_session on CODE_HOST; with the prefix __Host- over HTTPS), or the \
                  identity provider's cookie __session.",
};
const USER: Credential = Credential {
    name: "user",
    scheme: CredentialScheme::Bearer,
    description: "The identity provider's session JWT.",
};
const USER_CREDENTIALS: &[Credential] = &[SESSION, USER];

static LIST_SLOTS: BuiltinRoute = BuiltinRoute {
    operation: Operation {
        id: "listOwnSlots",
        method: Method::GET,
        path: "/_svc/slots",
        summary: "Lists the caller's slots, oldest first; browsers get a page.",
        credentials: USER_CREDENTIALS,
        parameters: &[],
        body: None,
        responses: &[
            documented_json(200, "The slots.", || object(&[("slots", array(schema_ref("UserSlot")))], &[])),
            SIGN_IN_REDIRECT,
            ACCOUNT_CHOICE_PAGE,
        ],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    host: None,
    action: BuiltinAction::ListSlots,
};

static CHOOSE_SLOT: BuiltinRoute = BuiltinRoute {
    operation: Operation {
        id: "chooseSlot",
        method: Method::POST,
        path: "/_svc/slots",
        summary: "Chooses the slot for this browser's session.",
        // The slot is stored in a browser session, which a request with a bearer token does not have.
        credentials: &[SESSION],
        parameters: &[],
        body: Some(|| request_object(&[("slot", slot_name_schema())], &[])),
        responses: &[
            documented_json(200, "The slot is chosen.", || object(&[("slot", slot_name_schema())], &[])),
            DocumentedResponse {
                status: 303,
                description: "Redirect to `/`, in response to a form.",
                content: Content::Nothing,
            },
        ],
        problems: &[
            Code::Forbidden,
            Code::NotFound,
            Code::RateLimited,
            Code::Unavailable,
            Code::DatabaseUnavailable,
        ],
    },
    host: None,
    action: BuiltinAction::ChooseSlot,
};

static CHOOSE_ACCOUNT: BuiltinRoute = BuiltinRoute {
    operation: Operation {
        id: "chooseAccount",
        method: Method::POST,
        path: account::PATH,
        summary: "Chooses the account that this browser uses if its session and the identity provider's cookie belong to different users.",
        credentials: USER_CREDENTIALS,
        parameters: &[],
        body: Some(|| {
            request_object(
                &[("account", string_enum(&account::AccountChoice::NAMES))],
                &[("returnTo", nul_free_text())],
            )
        }),
        responses: &[DocumentedResponse {
            status: 303,
            description: "Redirect to `returnTo`, a path on this host, with the chosen account.",
            content: Content::Nothing,
        }],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    host: None,
    action: BuiltinAction::ChooseAccount,
};

static MINT_APP_TOKEN: BuiltinRoute = BuiltinRoute {
    operation: Operation {
        id: "mintAppToken",
        method: Method::POST,
        path: "/_svc/app-token",
        summary: "Issues a token for one app on the caller's machine; the app's frame renews its token here.",
        credentials: USER_CREDENTIALS,
        parameters: &[],
        body: Some(|| request_object(&[("app", text_matching("^[a-z][a-z0-9-]{0,40}$"))], &[])),
        responses: &[documented_json(200, "The token.", || {
            object(&[("token", text()), ("expiresAt", count())], &[])
        })],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    host: Some(PublicHost::App),
    action: BuiltinAction::MintAppToken,
};

static SIGN_OUT: BuiltinRoute = BuiltinRoute {
    operation: Operation {
        id: "signOut",
        method: Method::POST,
        path: "/_svc/sign-out",
        summary: "Ends the caller's sessions on both hosts, revokes the caller's app tokens, and closes the caller's open streams.",
        credentials: &[],
        parameters: &[],
        body: None,
        responses: &[DocumentedResponse {
            status: 204,
            description: "The sessions have ended.",
            content: Content::Nothing,
        }],
        problems: &[
            Code::Unauthorized,
            Code::Forbidden,
            Code::RequestTooLarge,
            Code::RateLimited,
            Code::Unavailable,
            Code::DatabaseUnavailable,
        ],
    },
    host: None,
    action: BuiltinAction::SignOut,
};

static ISSUE_CODE: BuiltinRoute = BuiltinRoute {
    operation: Operation {
        id: "issueSessionCode",
        method: Method::GET,
        path: sign_in::ISSUE_CODE_PATH,
        summary: "On APP_HOST: redirects a browser back to CODE_HOST with a single-use code.",
        credentials: USER_CREDENTIALS,
        parameters: &[
            Parameter {
                name: "state",
                location: ParameterLocation::RequiredQuery,
                schema: nul_free_text,
                description: "The nonce that the browser holds on CODE_HOST.",
            },
            Parameter {
                name: "return_to",
                location: ParameterLocation::Query,
                schema: nul_free_text,
                description: "The final path on CODE_HOST; URLs of other hosts are ignored.",
            },
        ],
        body: None,
        responses: &[SIGN_IN_REDIRECT, ACCOUNT_CHOICE_PAGE],
        problems: &[Code::Forbidden, Code::RateLimited, Code::Unavailable, Code::DatabaseUnavailable],
    },
    host: Some(PublicHost::App),
    action: BuiltinAction::IssueCode,
};

static REDEEM_CODE: BuiltinRoute = BuiltinRoute {
    operation: Operation {
        id: "redeemSessionCode",
        method: Method::GET,
        path: sign_in::REDEEM_CODE_PATH,
        summary: "On CODE_HOST: exchanges the code and the browser's nonce for a session.",
        credentials: &[],
        parameters: &[Parameter {
            name: "code",
            location: ParameterLocation::RequiredQuery,
            schema: nul_free_text,
            description: "The single-use code.",
        }],
        body: None,
        responses: &[SIGN_IN_REDIRECT],
        problems: &[Code::Unauthorized, Code::RequestTooLarge, Code::RateLimited, Code::DatabaseUnavailable],
    },
    host: Some(PublicHost::Code),
    action: BuiltinAction::RedeemCode,
};

const SIGN_IN_REDIRECT: DocumentedResponse = DocumentedResponse {
    status: 302,
    description: "Redirect to the next step of the sign-in, or to the requested page.",
    content: Content::Nothing,
};

const ACCOUNT_CHOICE_PAGE: DocumentedResponse = DocumentedResponse {
    status: 409,
    description: "A page that asks which account to use, sent to browsers whose session and identity-provider cookie \
                  belong to different users.",
    content: Content::Other("text/html"),
};

const fn documented_json(
    status: u16,
    description: &'static str,
    schema: fn() -> Value,
) -> DocumentedResponse {
    DocumentedResponse { status, description, content: Content::Json(schema) }
}

fn slot_name_schema() -> Value {
    json!({ "type": "string", "pattern": Slot::PATTERN })
}

/// Returns the OpenAPI `servers` for the built-in routes.
pub fn openapi_servers() -> Value {
    let host = json!({ "default": "app.example", "description": "APP_HOST or CODE_HOST" });
    json!([{ "url": "https://{host}", "variables": { "host": host } }])
}

/// Returns the schema of a slot as shown to its user.
pub fn user_slot_schema() -> Value {
    object(
        &[
            ("slot", slot_name_schema()),
            ("handle", text()),
            ("machineId", uuid()),
            ("status", string_enum(Status::NAMES)),
            ("current", boolean()),
        ],
        &[],
    )
}
