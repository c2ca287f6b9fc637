//! Error messages for text that must be one of several names.

/// Returns the message for text that is none of `names`: "must be a, b or c".
pub fn must_be_one_of(names: &[&str]) -> String {
    match names {
        [] => "has no valid value".to_owned(),
        [name] => format!("must be {name}"),
        [others @ .., last] => format!("must be {} or {last}", others.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn must_be_one_of_joins_names() {
        assert_eq!(must_be_one_of(&["a"]), "must be a");
        assert_eq!(must_be_one_of(&["a", "b"]), "must be a or b");
        assert_eq!(must_be_one_of(&["a", "b", "c"]), "must be a, b or c");
    }
}
