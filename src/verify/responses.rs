//! The parts of the gateway's responses that the checks read. A host may be hostile: other fields are not stored, and
//! lists are bounded.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Maximum number of apps in a response, far above the number of apps on a machine.
const MAX_APPS: usize = 1000;

/// The response from `/readyz`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Readiness {
    pub status: String,
    pub database: String,
    pub apps: String,
    pub server: Option<String>,
}

/// The response from `/api/apps`.
#[derive(Debug, Deserialize)]
pub struct AppList {
    pub apps: BoundedList<App>,
}

#[derive(Debug, Deserialize)]
pub struct App {
    pub slug: Option<String>,
    #[serde(default)]
    pub status: String,
    pub error: Option<String>,
    pub icon: Option<String>,
    #[serde(default)]
    pub tables: Vec<IgnoredAny>,
}

/// The response from the bridge's `schemas` action.
#[derive(Debug, Deserialize)]
pub struct SchemaList {
    pub data: SchemaNames,
}

/// The names of the apps that have a schema. `data` is an array of objects, or an object keyed by name.
#[derive(Debug)]
pub struct SchemaNames(pub Vec<String>);

#[derive(Deserialize)]
struct AppSchema {
    app: Option<String>,
    slug: Option<String>,
}

/// A list of at most [`MAX_APPS`] items.
#[derive(Debug)]
pub struct BoundedList<T>(pub Vec<T>);

fn too_many_apps<E: Error>() -> E {
    E::custom(format!("more than {MAX_APPS} apps"))
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            if list.len() == MAX_APPS {
                return Err(too_many_apps());
            }
            list.push(item);
        }
        Ok(list)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for BoundedList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor(PhantomData)).map(Self)
    }
}

struct NamesVisitor;

impl<'de> Visitor<'de> for NamesVisitor {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects, or an object keyed by name")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Vec<String>, A::Error> {
        let items = ListVisitor::<AppSchema>(PhantomData).visit_seq(items)?;
        Ok(items.into_iter().filter_map(|item| item.app.or(item.slug)).collect())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Vec<String>, A::Error> {
        let mut names = Vec::new();
        while let Some((name, IgnoredAny)) = items.next_entry()? {
            if names.len() == MAX_APPS {
                return Err(too_many_apps());
            }
            names.push(name);
        }
        Ok(names)
    }
}

impl<'de> Deserialize<'de> for SchemaNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NamesVisitor).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_names_accept_an_array_or_an_object() {
        let names = |text: &str| serde_json::from_str::<SchemaList>(text).map(|list| list.data.0);
        let array = r#"{"data": [{"app": "notes", "tables": [[1]]}, {"app": "a", "slug": "b"}, {"slug": "tasks"}, {}]}"#;
        assert_eq!(names(array).unwrap(), ["notes", "a", "tasks"]);
        assert_eq!(names(r#"{"data": {"notes": {"tables": []}}}"#).unwrap(), ["notes"]);
        assert!(names(r#"{"data": "notes"}"#).is_err());
    }

    #[test]
    fn lists_are_bounded() {
        let list = |count: usize| format!("[{}]", vec!["{\"slug\":\"a\"}"; count].join(","));
        let apps = |count| serde_json::from_str::<AppList>(&format!("{{\"apps\":{}}}", list(count)));
        assert_eq!(apps(MAX_APPS).unwrap().apps.0.len(), MAX_APPS);
        assert!(apps(MAX_APPS + 1).unwrap_err().to_string().contains("more than 1000 apps"));
        let schemas = |count| serde_json::from_str::<SchemaList>(&format!("{{\"data\":{}}}", list(count)));
        assert!(schemas(MAX_APPS).is_ok() && schemas(MAX_APPS + 1).is_err());
    }
}
