//! Attributes that are stored with an object's content and returned unchanged.
//!
//! The protocol's inputs and outputs share these fields but no type, so macros copy them.

/// An object's content headers, and its user-defined metadata.
#[derive(Clone, Debug, Default)]
pub(super) struct Attributes {
    pub(super) content_type: Option<String>,
    pub(super) cache_control: Option<String>,
    pub(super) content_disposition: Option<String>,
    pub(super) content_encoding: Option<String>,
    pub(super) content_language: Option<String>,
    pub(super) metadata: Option<s3s::dto::Metadata>,
}

/// Extracts the attributes from a `PutObject` or `CreateMultipartUpload` input.
macro_rules! attributes_of {
    ($input:expr) => {
        $crate::s3::attributes::Attributes {
            content_type: $input.content_type,
            cache_control: $input.cache_control,
            content_disposition: $input.content_disposition,
            content_encoding: $crate::s3::attributes::remove_aws_chunked($input.content_encoding),
            content_language: $input.content_language,
            metadata: $input.metadata,
        }
    };
}

/// Builds a `GetObject` or `HeadObject` output with the fields that both have in common.
macro_rules! object_output {
    ($output:ident, $object:expr) => {{
        let attributes = $object.attributes.clone();
        $output {
            accept_ranges: Some("bytes".to_owned()),
            content_length: i64::try_from($object.body.len()).ok(),
            e_tag: Some($object.etag.clone()),
            last_modified: Some($object.modified()),
            content_type: attributes.content_type,
            cache_control: attributes.cache_control,
            content_disposition: attributes.content_disposition,
            content_encoding: attributes.content_encoding,
            content_language: attributes.content_language,
            metadata: attributes.metadata,
            ..$output::default()
        }
    }};
}

pub(super) use {attributes_of, object_output};

/// Removes `aws-chunked`, which is a transfer encoding, not a content encoding.
pub(super) fn remove_aws_chunked(content_encoding: Option<String>) -> Option<String> {
    let encodings = content_encoding?;
    let content_encodings: Vec<_> =
        encodings.split(',').map(str::trim).filter(|e| !e.is_empty() && *e != "aws-chunked").collect();
    (!content_encodings.is_empty()).then(|| content_encodings.join(","))
}
