//! Hosts and operators download bundles in full or in ranges. A download is resumed only while the object is unchanged.

use reqwest::Method;

use super::stack::{Process, SECRET, Stack};

const PATH: &str = "/system-bundles/v1/svc-host-bundle.tar.gz";

fn bundle_request(
    stack: &Stack,
    process: &Process,
    headers: &[(&'static str, &str)],
) -> reqwest::RequestBuilder {
    let request = stack.request(process, Method::GET, PATH).bearer_auth(SECRET);
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_is_served_in_full_and_in_ranges() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let whole = stack.send(bundle_request(&stack, &process, &[])).await;
    assert_eq!((whole.status, whole.text.as_str()), (200, "0123456789"));
    let etag = whole.headers["etag"].to_str().unwrap().to_owned();
    assert_eq!(whole.headers["accept-ranges"], "bytes");

    let part =
        stack.send(bundle_request(&stack, &process, &[("range", "bytes=4-"), ("if-range", &etag)])).await;
    assert_eq!((part.status, part.text.as_str()), (206, "456789"));
    assert_eq!(part.headers["content-range"], "bytes 4-9/10");
    for validator in ["\"other\"", "*", &format!("W/{etag}")] {
        let headers = [("range", "bytes=4-"), ("if-range", validator)];
        let changed = stack.send(bundle_request(&stack, &process, &headers)).await;
        assert_eq!((changed.status, changed.text.as_str()), (200, "0123456789"), "if-range: {validator}");
    }
    stack
        .send(bundle_request(&stack, &process, &[("range", "bytes=10-")]))
        .await
        .assert_problem(416, "range_not_satisfiable");
    for validator in [&etag, &format!("W/{etag}"), &format!("\"other\", {etag}"), "*"] {
        let response = stack.send(bundle_request(&stack, &process, &[("if-none-match", validator)])).await;
        assert_eq!(response.status, 304, "if-none-match: {validator}");
    }

    // The Range header of a HEAD request is ignored.
    let head = stack.request(&process, Method::HEAD, PATH).bearer_auth(SECRET).header("range", "bytes=4-");
    let head = stack.send(head).await;
    assert_eq!(
        (head.status, head.text.as_str(), head.headers["content-length"].to_str().unwrap()),
        (200, "", "10")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_download_requires_operator_or_host_token() {
    let stack = Stack::start().await;
    let process = stack.start_platform();
    let host_settings = stack.start_machine(&process, "user_1").await;
    let host = stack
        .request(&process, Method::GET, &format!("{PATH}.sha256"))
        .bearer_auth(&host_settings.upgrade_token);
    assert!(stack.send(host).await.text.ends_with("  svc-host-bundle.tar.gz\n"));
    let anonymous = stack.request(&process, Method::GET, PATH);
    stack.send(anonymous).await.assert_problem(401, "unauthorized");
    let wrong = stack.request(&process, Method::GET, PATH).bearer_auth(&host_settings.registration_token);
    stack.send(wrong).await.assert_problem(401, "unauthorized");
    let path = "/system-bundles/v1/secret.txt";
    stack.get(&process, path).await.assert_problem(404, "not_found");
    for path in [format!("{PATH}.json"), PATH.replace("v1", "v2"), PATH.replace("v1", "..%2f..")] {
        stack.get(&process, &path).await.assert_problem(404, "bundle_not_found");
    }
}
