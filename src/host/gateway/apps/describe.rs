//! App routes and their OpenAPI descriptions.

use http::Method;
use serde_json::Value;

use crate::auth::{READERS, VIEWERS};
use crate::endpoint::{DEFAULT_MAX_BODY_BYTES, Endpoint, documented_json};
use svc_http::openapi::{
    Content, DocumentedResponse, Operation, Parameter, ParameterLocation, array, count, nullable, object,
    schema_ref, string_enum, text,
};
use svc_http::problem::Code;

pub static LIST: Endpoint = Endpoint {
    operation: Operation {
        id: "listApps",
        method: Method::GET,
        path: "/api/apps",
        summary: "Lists all apps, with their errors.",
        credentials: READERS,
        parameters: &[],
        body: None,
        responses: &[documented_json(200, "The apps.", || {
            object(&[("apps", array(schema_ref("App")))], &[])
        })],
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static ICON: Endpoint = Endpoint {
    operation: Operation {
        id: "getIcon",
        method: Method::GET,
        path: "/icons/{slug}",
        summary: "An app's icon, or one generated from its slug.",
        credentials: READERS,
        parameters: &[SLUG],
        body: None,
        responses: PAGE_RESPONSES,
        problems: &[Code::Forbidden, Code::Unavailable],
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static FRONT_PAGE_REDIRECT: Endpoint = Endpoint {
    operation: Operation {
        id: "openApp",
        method: Method::GET,
        path: "/apps/{slug}",
        summary: "Redirects to the app's front page.",
        credentials: VIEWERS,
        parameters: &[SLUG],
        body: None,
        responses: &[DocumentedResponse {
            status: 308,
            description: "Redirects to /apps/{slug}/.",
            content: Content::Nothing,
        }],
        problems: PAGE_PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static FRONT_PAGE: Endpoint = Endpoint {
    operation: Operation {
        id: "getFrontPage",
        method: Method::GET,
        path: "/apps/{slug}/",
        summary: "The app's front page, in a separate origin.",
        credentials: VIEWERS,
        parameters: &[SLUG],
        body: None,
        responses: PAGE_RESPONSES,
        problems: PAGE_PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

pub static PAGE: Endpoint = Endpoint {
    operation: Operation {
        id: "getPage",
        method: Method::GET,
        path: "/apps/{slug}/{*path}",
        summary: "A file from the app's build; a missing path without an extension returns the front page.",
        credentials: VIEWERS,
        parameters: &[
            SLUG,
            Parameter {
                name: "path",
                location: ParameterLocation::Path,
                schema: text,
                description: "The rest of the path, including slashes.",
            },
        ],
        body: None,
        responses: PAGE_RESPONSES,
        problems: PAGE_PROBLEMS,
    },
    max_body_bytes: DEFAULT_MAX_BODY_BYTES,
};

const SLUG: Parameter = Parameter {
    name: "slug",
    location: ParameterLocation::Path,
    schema: text,
    description: "The app's slug.",
};
const NOT_MODIFIED: DocumentedResponse =
    DocumentedResponse { status: 304, description: "Not modified.", content: Content::Nothing };
const PAGE_RESPONSES: &[DocumentedResponse] = &[
    file_response(200, "The file."),
    file_response(206, "The range requested by `Range`."),
    NOT_MODIFIED,
    file_response(412, "The file does not match `If-Match`."),
    file_response(416, "The range is not satisfiable."),
];
const PAGE_PROBLEMS: &[Code] = &[Code::Forbidden, Code::NotFound, Code::Unavailable];

/// Describes a file response of any media type.
const fn file_response(status: u16, description: &'static str) -> DocumentedResponse {
    DocumentedResponse { status, description, content: Content::Other("*/*") }
}

/// JSON schema of an app in the list.
pub fn app_schema_json() -> Value {
    object(
        &[("slug", nullable(text())), ("status", string_enum(&["ready", "waiting", "error"]))],
        &[
            ("name", nullable(text())),
            ("version", nullable(text())),
            ("runtime", nullable(string_enum(&["vite", "static", "node"]))),
            ("folder", nullable(text())),
            ("url", nullable(text())),
            ("connect", array(text())),
            ("storage", object(&[("databaseBytes", nullable(count())), ("quotaBytes", count())], &[])),
            ("icon", text()),
            ("tables", array(text())),
            ("error", nullable(text())),
            ("notDone", array(text())),
        ],
    )
}
