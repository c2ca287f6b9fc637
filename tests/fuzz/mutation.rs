//! Document mutations: flipped bits and replaced bytes; removed, duplicated and inserted byte ranges; truncation; and
//! replaced or removed JSON values.

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};

/// One mutation. Its position is relative to the document's length, so that it applies to any document.
#[derive(Debug, Clone)]
pub enum Mutation {
    FlipBit {
        position: Index,
        bit: u8,
    },
    ReplaceByte {
        position: Index,
        byte: u8,
    },
    Insert {
        position: Index,
        fragment: &'static [u8],
    },
    Remove {
        position: Index,
        length: u8,
    },
    Duplicate {
        position: Index,
        length: u8,
    },
    Truncate {
        position: Index,
    },
    /// Replaces a value in a JSON document; documents that are not JSON do not change.
    ReplaceValue {
        position: Index,
        value: Value,
    },
    /// Removes an object's field from a JSON document; has no effect on the root or an array's element.
    RemoveField {
        position: Index,
    },
}

/// Byte sequences that often break parsers.
const FRAGMENTS: [&[u8]; 24] = [
    b"..",
    b"../",
    b"/",
    b"//",
    b"\0",
    b"\"",
    b"\\",
    b"{",
    b"}",
    b"[[[[[[[[[[[[",
    b"null",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"9007199254740993",
    b"\n",
    b"\r\n",
    b"=",
    b" ",
    b"%2e%2e%2f",
    b"\xff\xfe",
    b"\xe2\x80\xae",
    b"#",
    b"$(id)",
];

impl Arbitrary for Mutation {
    type Parameters = ();
    type Strategy = BoxedStrategy<Self>;

    fn arbitrary_with((): ()) -> Self::Strategy {
        let position = || any::<Index>();
        prop_oneof![
            2 => (position(), 0..8u8).prop_map(|(position, bit)| Self::FlipBit { position, bit }),
            2 => (position(), any::<u8>()).prop_map(|(position, byte)| Self::ReplaceByte { position, byte }),
            3 => (position(), prop::sample::select(&FRAGMENTS[..])).prop_map(|(position, fragment)| Self::Insert { position, fragment }),
            1 => (position(), 1..40u8).prop_map(|(position, length)| Self::Remove { position, length }),
            1 => (position(), 1..40u8).prop_map(|(position, length)| Self::Duplicate { position, length }),
            1 => position().prop_map(|position| Self::Truncate { position }),
            4 => (position(), replacement_values()).prop_map(|(position, value)| Self::ReplaceValue { position, value }),
            1 => position().prop_map(|position| Self::RemoveField { position }),
        ]
        .boxed()
    }
}

/// Generates values that many fields must reject.
fn replacement_values() -> impl Strategy<Value = Value> {
    let fixed = vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1.5),
        json!(u64::MAX),
        json!(u32::MAX),
        json!(""),
        json!("../../../x"),
        json!("a/b"),
        json!("system/db/snapshots/../../../other/primary/system/db/snapshots/x.dump"),
        json!("2026-01-02T03:04:05Z"),
        json!("-009999-01-01T00:00:00Z"),
        json!("x".repeat(5000)),
        json!([]),
        json!({}),
        json!([{"name": "t", "rows": u64::MAX}, {"name": "u", "rows": u64::MAX}]),
    ];
    prop_oneof![
        prop::sample::select(fixed),
        any::<u64>().prop_map(|n| json!(n)),
        "\\PC{0,20}".prop_map(|s| json!(s))
    ]
}

pub fn mutate(mut bytes: Vec<u8>, mutations: &[Mutation]) -> Vec<u8> {
    for mutation in mutations {
        apply(&mut bytes, mutation);
    }
    bytes
}

fn apply(bytes: &mut Vec<u8>, mutation: &Mutation) {
    let length = bytes.len();
    let range = |position: &Index, max: u8| {
        let from = position.index(length.max(1)).min(length);
        from..(from + usize::from(max)).min(length)
    };
    match mutation {
        Mutation::FlipBit { position, bit } if length > 0 => bytes[position.index(length)] ^= 1 << bit,
        Mutation::ReplaceByte { position, byte } if length > 0 => bytes[position.index(length)] = *byte,
        Mutation::FlipBit { .. } | Mutation::ReplaceByte { .. } => {}
        Mutation::Insert { position, fragment } => {
            let position = position.index(length + 1);
            bytes.splice(position..position, fragment.iter().copied());
        }
        Mutation::Remove { position, length } => drop(bytes.drain(range(position, *length))),
        Mutation::Duplicate { position, length } => {
            let range = range(position, *length);
            let (end, copy) = (range.end, bytes[range].to_vec());
            bytes.splice(end..end, copy);
        }
        Mutation::Truncate { position } => bytes.truncate(position.index(length + 1)),
        Mutation::ReplaceValue { position, value } => edit_json(bytes, |document, paths| {
            let path = &paths[position.index(paths.len())];
            if let Some(target) = document.pointer_mut(path) {
                *target = value.clone();
            }
        }),
        Mutation::RemoveField { position } => edit_json(bytes, |document, paths| {
            let path = &paths[position.index(paths.len())];
            let Some((parent, name)) = path.rsplit_once('/') else { return };
            if let Some(Value::Object(parent)) = document.pointer_mut(parent) {
                parent.remove(&name.replace("~1", "/").replace("~0", "~"));
            }
        }),
    }
}

/// Changes a JSON document. The closure receives the JSON pointers of all values, which always include the root.
fn edit_json(bytes: &mut Vec<u8>, change: impl FnOnce(&mut Value, &[String])) {
    let Ok(mut document) = serde_json::from_slice::<Value>(bytes) else { return };
    let mut paths = Vec::new();
    collect_paths(&document, String::new(), &mut paths);
    change(&mut document, &paths);
    *bytes = serde_json::to_vec(&document).expect("a value serializes to JSON");
}

fn collect_paths(value: &Value, path: String, paths: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                collect_paths(value, format!("{path}/{}", name.replace('~', "~0").replace('/', "~1")), paths);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                collect_paths(value, format!("{path}/{index}"), paths);
            }
        }
        _ => {}
    }
    paths.push(path);
}
