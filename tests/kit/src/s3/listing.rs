//! Object listings: ListObjects and ListObjectsV2.

use s3s::dto::*;
use s3s::{S3Result, s3_error};

use super::store::{Cursor, Page, Store};

const MAX_PAGE_KEYS: i32 = 1000;

impl Store {
    pub(super) fn list_objects_v2(&self, input: ListObjectsV2Input) -> S3Result<ListObjectsV2Output> {
        let start_after = input.start_after.clone().map(Cursor::After);
        let from = input.continuation_token.as_deref().map(from_token).transpose()?.or(start_after);
        let max_keys = input.max_keys.unwrap_or(MAX_PAGE_KEYS);
        let page = self.list_page(&input.bucket, &input.prefix, &input.delimiter, from, max_keys)?;
        let (contents, common_prefixes) = entries(&page);
        Ok(ListObjectsV2Output {
            key_count: i32::try_from(contents.len() + common_prefixes.len()).ok(),
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            is_truncated: Some(page.next.is_some()),
            next_continuation_token: page.next.as_ref().map(to_token),
            continuation_token: input.continuation_token,
            start_after: input.start_after,
            max_keys: Some(max_keys),
            name: Some(input.bucket),
            prefix: input.prefix,
            delimiter: input.delimiter,
            ..ListObjectsV2Output::default()
        })
    }

    pub(super) fn list_objects(&self, input: ListObjectsInput) -> S3Result<ListObjectsOutput> {
        let delimiter = input.delimiter.as_deref().unwrap_or_default();
        let from = input.marker.clone().map(|marker| match marker.strip_suffix(delimiter) {
            Some(_) if !delimiter.is_empty() => Cursor::AfterPrefix(marker),
            _ => Cursor::After(marker),
        });
        let max_keys = input.max_keys.unwrap_or(MAX_PAGE_KEYS);
        let page = self.list_page(&input.bucket, &input.prefix, &input.delimiter, from, max_keys)?;
        let (contents, common_prefixes) = entries(&page);
        Ok(ListObjectsOutput {
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            is_truncated: Some(page.next.is_some()),
            next_marker: page.next.map(|(Cursor::After(marker) | Cursor::AfterPrefix(marker))| marker),
            marker: input.marker,
            max_keys: Some(max_keys),
            name: Some(input.bucket),
            prefix: input.prefix,
            delimiter: input.delimiter,
            ..ListObjectsOutput::default()
        })
    }

    fn list_page(
        &self,
        bucket: &str,
        prefix: &Option<String>,
        delimiter: &Option<String>,
        from: Option<Cursor>,
        max_keys: i32,
    ) -> S3Result<Page> {
        let max = usize::try_from(max_keys.min(MAX_PAGE_KEYS))
            .map_err(|_| s3_error!(InvalidArgument, "max-keys must not be negative"))?;
        let delimiter = delimiter.as_deref().filter(|delimiter| !delimiter.is_empty());
        self.with_bucket(bucket, |bucket| {
            Ok(bucket.list(prefix.as_deref().unwrap_or_default(), delimiter, from, max))
        })
    }
}

fn entries(page: &Page) -> (Vec<Object>, Vec<CommonPrefix>) {
    let objects = page.objects.iter().map(|(key, object)| Object {
        key: Some(key.clone()),
        size: i64::try_from(object.body.len()).ok(),
        e_tag: Some(object.etag.clone()),
        last_modified: Some(object.modified()),
        ..Object::default()
    });
    let prefixes = page.prefixes.iter().map(|prefix| CommonPrefix { prefix: Some(prefix.clone()) });
    (objects.collect(), prefixes.collect())
}

fn to_token(cursor: &Cursor) -> String {
    match cursor {
        Cursor::After(key) => hex::encode(format!("k{key}")),
        Cursor::AfterPrefix(prefix) => hex::encode(format!("p{prefix}")),
    }
}

fn from_token(token: &str) -> S3Result<Cursor> {
    let text = hex::decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
    match (text.strip_prefix('k'), text.strip_prefix('p')) {
        (Some(key), _) => Ok(Cursor::After(key.to_owned())),
        (_, Some(prefix)) => Ok(Cursor::AfterPrefix(prefix.to_owned())),
        _ => Err(s3_error!(InvalidArgument, "invalid continuation token")),
    }
}
