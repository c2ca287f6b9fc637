//! An HTTP layer below object_store: removes from listings the names that object_store rejects.
//!
//! A host can write any key in its slot, including one with an empty, `.` or `..` segment or a control character. One
//! such name makes object_store fail the whole listing. svc never writes such names, and object_store can neither read
//! nor delete such an object.

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::TryStreamExt;
use http::header::CONTENT_LENGTH;
use object_store::client::{
    HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use object_store::path::Path;
use quick_xml::events::Event;
use quick_xml::reader::Reader;
use serde::Deserialize;

use super::list_counter::lists_keys;
use svc_base::untrusted_text::{one_line, truncate_printable};

/// Maximum size of a page of a listing. 1,000 keys of 1,024 bytes take 6 MiB if each byte is escaped as six bytes.
const MAX_PAGE_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct ListFilter {
    pub(super) inner: HttpClient,
}

#[async_trait]
impl HttpService for ListFilter {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_listing = lists_keys(&request);
        let response = self.inner.execute(request).await?;
        if !is_listing || !response.status().is_success() {
            return Ok(response);
        }
        let (mut parts, body) = response.into_parts();
        let page = read_page(body).await?;
        let Some(filtered) = remove_invalid_names(&page) else {
            return Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(page)));
        };
        tracing::warn!(
            first = %one_line(&truncate_printable(&filtered.first)),
            count = filtered.removed_count,
            "a listing contains invalid names, which svc did not write; they are ignored"
        );
        parts.headers.remove(CONTENT_LENGTH);
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(filtered.page)))
    }
}

async fn read_page(body: HttpResponseBody) -> Result<Bytes, HttpError> {
    let mut chunks = body.bytes_stream();
    let mut page = Vec::new();
    while let Some(chunk) = chunks.try_next().await? {
        if page.len() + chunk.len() > MAX_PAGE_BYTES {
            let reason = format!("a page of a listing is larger than {MAX_PAGE_BYTES} bytes");
            return Err(HttpError::new(HttpErrorKind::Decode, std::io::Error::other(reason)));
        }
        page.extend_from_slice(&chunk);
    }
    Ok(page.into())
}

/// A page of a listing without its invalid names.
struct FilteredPage {
    page: Vec<u8>,
    removed_count: usize,
    /// The first removed name.
    first: String,
}

/// Removes the objects and common prefixes with invalid names; `None` if there are none, or if the page is not XML,
/// which object_store reports.
fn remove_invalid_names(page: &[u8]) -> Option<FilteredPage> {
    let mut reader = Reader::from_reader(page);
    let (mut output, mut copied) = (Vec::new(), 0);
    let (mut removed_count, mut first) = (0, None);
    loop {
        // Unlike `buffer_position`, this includes a byte order mark.
        let start = page.len() - reader.get_ref().len();
        match reader.read_event().ok()? {
            Event::Start(tag) if matches!(tag.local_name().into_inner(), b"Contents" | b"CommonPrefixes") => {
                reader.read_to_end(tag.name()).ok()?;
                let end = page.len() - reader.get_ref().len();
                if let Some(name) = find_invalid_name(&page[start..end]) {
                    output.extend_from_slice(&page[copied..start]);
                    copied = end;
                    removed_count += 1;
                    first.get_or_insert(name);
                }
            }
            Event::Eof => break,
            _ => {}
        }
    }
    let first = first?;
    output.extend_from_slice(&page[copied..]);
    Some(FilteredPage { page: output, removed_count, first })
}

/// A `Contents` element, which has a key, or a `CommonPrefixes` element, which has a prefix. Both fields are lists, so
/// that an element with no value or several values can be parsed; object_store reports the error.
#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "Key", default)]
    keys: Vec<String>,
    #[serde(rename = "Prefix", default)]
    prefixes: Vec<String>,
}

/// Returns the name in an element if object_store rejects it, or the whole element if its text cannot be decoded. Uses
/// the same parsers as object_store.
fn find_invalid_name(element: &[u8]) -> Option<String> {
    let entry = std::str::from_utf8(element).ok().and_then(|xml| quick_xml::de::from_str::<Entry>(xml).ok());
    let Some(Entry { keys, prefixes }) = entry else {
        return Some(String::from_utf8_lossy(element).into_owned());
    };
    keys.into_iter().chain(prefixes).find(|name| Path::parse(name).is_err())
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Method};
    use kit::s3::S3Server;

    use super::*;
    use crate::config::StoreConfig;
    use crate::write_once::tests::empty_request;
    use svc_base::config::Env;

    /// Returns a page with these names, which must already be escaped. Those that end with `/` are common prefixes.
    fn page_of(names: &[&str]) -> String {
        let element = |name: &&str| match name.ends_with('/') {
            true => format!("<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"),
            false => format!(
                "<Contents><Key>{name}</Key><ETag>&quot;0&quot;</ETag><Size>1</Size>\
                 <Owner><ID>x</ID></Owner></Contents>"
            ),
        };
        let elements: String = names.iter().map(element).collect();
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult><Name>b</Name><Prefix>u//</Prefix>\
             {elements}<NextContinuationToken>a&amp;//b</NextContinuationToken></ListBucketResult>"
        )
    }

    #[test]
    fn remove_invalid_names_keeps_valid_ones() {
        let valid = ["u/a", "u/a&amp;b", "u/&lt;Key&gt;", "u/..a", "u/...", "/u", "u/b", "u/d/", "u/ä&amp;/"];
        assert!(remove_invalid_names(page_of(&valid).as_bytes()).is_none());
        let invalid = ["u//&amp;", "u//", "u/../"];
        let mixed: Vec<&str> = valid.iter().zip(invalid).flat_map(|(valid, bad)| [bad, *valid]).collect();
        let filtered = remove_invalid_names(page_of(&mixed).as_bytes()).unwrap();
        assert_eq!(String::from_utf8(filtered.page).unwrap(), page_of(&valid[..invalid.len()]));
        assert_eq!((filtered.removed_count, filtered.first.as_str()), (3, "u//&"));
    }

    #[test]
    fn remove_invalid_names_removes_what_object_store_rejects() {
        for invalid in [
            "u//a",
            "u/../a",
            "u/./a",
            "u/..",
            "//u",
            "u//",
            "u/./",
            "u/&#46;&#x2E;/a",
            "u/&#x1;",
            "u/&#0;",
            "u/\u{7f}",
            "u/&unknown;",
        ] {
            let page = page_of(&["u/a", invalid, "u/d/"]);
            for page in [page.clone(), format!("\u{feff}{page}")] {
                let filtered = remove_invalid_names(page.as_bytes()).expect(invalid);
                let rest = String::from_utf8(filtered.page).unwrap();
                assert_eq!(rest.trim_start_matches('\u{feff}'), page_of(&["u/a", "u/d/"]), "{invalid}");
                assert_eq!(filtered.removed_count, 1, "{invalid}");
            }
        }
        let not_utf8: Vec<u8> =
            page_of(&["u/~"]).bytes().map(|byte| if byte == b'~' { 0xff } else { byte }).collect();
        assert_eq!(remove_invalid_names(&not_utf8).unwrap().page, page_of(&[]).as_bytes());
    }

    /// A store that always sends the same response.
    #[derive(Debug)]
    struct FixedResponse(String);

    #[async_trait]
    impl HttpService for FixedResponse {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let mut response = HttpResponse::new(self.0.clone().into());
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(self.0.len()));
            Ok(response)
        }
    }

    #[tokio::test]
    async fn call_changes_only_listings_with_invalid_names() {
        let (listing, object) = ("http://store/b?list-type=2&prefix=u%2F", "http://store/b/u/a");
        let (valid, mixed) = (page_of(&["u/a"]), page_of(&["u/a", "u//a"]));
        for (uri, original, expected) in
            [(listing, &valid, &valid), (listing, &mixed, &valid), (object, &mixed, &mixed)]
        {
            let layer = ListFilter { inner: HttpClient::new(FixedResponse(original.clone())) };
            let response = layer.call(empty_request(Method::GET, uri)).await.unwrap();
            assert_eq!(response.headers().contains_key(CONTENT_LENGTH), original == expected, "{uri}");
            assert_eq!(response.into_body().bytes().await.unwrap(), expected.as_bytes(), "{uri}");
        }
    }

    #[tokio::test]
    async fn read_page_rejects_a_page_above_the_limit() {
        assert!(read_page(vec![b' '; MAX_PAGE_BYTES].into()).await.is_ok());
        assert!(read_page(vec![b' '; MAX_PAGE_BYTES + 1].into()).await.is_err());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn listing_of_a_store_ignores_invalid_names() {
        svc_http::tls::install_provider();
        let dir = tempfile::tempdir().unwrap();
        let server = S3Server::start(dir.path()).unwrap();
        for key in ["u/f/a", "u/f//x", "u/f/./x", "u/f/../x", "u/f/index//x", "u/f/index/b", "u/f/z/.."] {
            server.write("fleet", key, "x");
        }
        let pairs = server.env("fleet");
        let mut env = Env::from_pairs(pairs.iter().map(|(name, value)| (&**name, &**value)));
        let config = StoreConfig::read(&mut env);
        let bucket = env.finish(config).unwrap().open().unwrap();
        let prefix = Path::from("u/f");
        let listed = bucket.raw().list(Some(&prefix)).map_ok(|object| object.location.to_string());
        assert_eq!(listed.try_collect::<Vec<_>>().await.unwrap(), ["u/f/a", "u/f/index/b"]);
        let listed = bucket.raw().list_with_delimiter(Some(&prefix)).await.unwrap();
        assert_eq!(listed.common_prefixes, [Path::from("u/f/index"), Path::from("u/f/z")]);
        assert_eq!(listed.objects.len(), 1, "{:?}", listed.objects);
    }
}
