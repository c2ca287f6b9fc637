//! Deserializes lists in objects that hosts write. The maximum length is enforced during parsing: a longer list is
//! never held in memory.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Deserializes a list of at most `MAX` elements.
///
/// # Errors
/// If the value is not a list, an element is invalid, or the list has more than `MAX` elements.
pub(super) fn deserialize_at_most<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_seq(BoundedVisitor::<T, MAX>(PhantomData))
}

/// Like [`deserialize_at_most`], but returns `None` for `null`.
///
/// # Errors
/// Same as [`deserialize_at_most`], except that `null` is accepted.
pub(super) fn deserialize_optional_at_most<'de, D, T, const MAX: usize>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::<BoundedList<T, MAX>>::deserialize(deserializer)?.map(|list| list.0))
}

struct BoundedList<T, const MAX: usize>(Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedList<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_at_most::<D, T, MAX>(deserializer).map(Self)
    }
}

struct BoundedVisitor<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for BoundedVisitor<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX} elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            if items.len() == MAX {
                return Err(A::Error::invalid_length(MAX + 1, &self));
            }
            items.push(item);
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Lists {
        #[serde(deserialize_with = "deserialize_at_most::<_, _, 3>")]
        all: Vec<u8>,
        #[serde(default, deserialize_with = "deserialize_optional_at_most::<_, _, 2>")]
        some: Option<Vec<u8>>,
    }

    fn parse(text: &str) -> Result<(Vec<u8>, Option<Vec<u8>>), String> {
        serde_json::from_str(text).map(|Lists { all, some }| (all, some)).map_err(|error| error.to_string())
    }

    #[test]
    fn deserialize_at_most_refuses_longer_lists() {
        assert_eq!(parse(r#"{"all": [1, 2, 3]}"#), Ok((vec![1, 2, 3], None)));
        assert_eq!(parse(r#"{"all": [], "some": null}"#), Ok((vec![], None)));
        assert_eq!(parse(r#"{"all": [], "some": [1, 2]}"#), Ok((vec![], Some(vec![1, 2]))));
        for bad in [r#"{"all": [1, 2, 3, 4]}"#, r#"{"all": [], "some": [1, 2, 3]}"#] {
            assert!(parse(bad).is_err_and(|error| error.contains("at most")), "{bad}");
        }
    }
}
