//! Tests which requests are admitted, and as which principal.

use anyhow::Result;
use kit::idp::{Flaw, Idp, MintOptions};
use reqwest::{Method, StatusCode};
use serde_json::json;
use svc::http::proof::{Claims, ProofKeys, Route};
use svc::machine::id::MachineId;

use super::host::{Host, Machine, UNREACHABLE_DATABASE, USER, send_json, signer};

const ADMIN_TOKEN: &str = "admin-secret-0123456789-0123456789";

async fn status_with_proof(host: &Host, claims: &Claims) -> Result<StatusCode> {
    let proof = host.machine.signer.sign(claims);
    Ok(host.unsigned_request(Method::GET, "/api/backups").header("x-svc-proof", proof).send().await?.status())
}

#[tokio::test]
async fn public_port_serves_only_health_without_proof() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    for path in
        ["/", "/api/apps", "/api/backups", "/api/bridge/schemas", "/api/canvas", "/apps/x/", "/icons/x", "/x"]
    {
        let (status, problem) = send_json(host.unsigned_request(Method::GET, path)).await?;
        assert_eq!(
            (status, problem["code"].as_str()),
            (StatusCode::UNAUTHORIZED, Some("unauthorized")),
            "{path}"
        );
    }
    for path in ["/api/bridge/query", "/_svc/internal/backup", "/_svc/internal/other", "/livez/"] {
        let response =
            host.unsigned_request(Method::POST, path).json(&json!({ "action": "schemas" })).send().await?;
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{path}");
    }
    assert_eq!(host.unsigned_request(Method::GET, "/livez").send().await?.status(), StatusCode::OK);
    let ready = host.unsigned_request(Method::GET, "/readyz").send().await?;
    assert_eq!(
        ready.status(),
        StatusCode::SERVICE_UNAVAILABLE,
        "the gateway must not be ready without a database"
    );
    Ok(())
}

#[tokio::test]
async fn only_current_proof_for_machine_and_owner_is_accepted() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let good = host.machine.claims(Route::Shell);
    assert_eq!(status_with_proof(&host, &good).await?, StatusCode::OK);
    type Change = fn(&mut Claims);
    let cases: [(&str, StatusCode, Change); 8] = [
        ("expired", StatusCode::UNAUTHORIZED, |c| (c.iat, c.exp) = (c.iat - 200, c.exp - 200)),
        ("not yet valid", StatusCode::UNAUTHORIZED, |c| (c.iat, c.exp) = (c.iat + 200, c.exp + 200)),
        ("too long a lifetime", StatusCode::UNAUTHORIZED, |c| c.exp = c.iat + 3600),
        ("another machine", StatusCode::UNAUTHORIZED, |c| c.aud = MachineId::new()),
        ("another issuer", StatusCode::UNAUTHORIZED, |c| c.iss = "me".into()),
        ("another user", StatusCode::FORBIDDEN, |c| {
            c.sub = "user_other".parse().expect("the user id is valid");
        }),
        ("route app without an app", StatusCode::UNAUTHORIZED, |c| c.route = Route::App),
        ("an internal proof for another route", StatusCode::FORBIDDEN, |c| {
            c.route = Route::Internal;
            (c.method, c.path, c.jti) = (Some("GET".into()), Some("/api/backups".into()), Some("j".into()));
        }),
    ];
    for (case, status, change) in cases {
        let mut claims = good.clone();
        change(&mut claims);
        assert_eq!(status_with_proof(&host, &claims).await?, status, "{case}");
    }
    let forged = signer("k1").sign(&good);
    let unknown = signer("k9").sign(&good);
    for proof in [forged.as_str(), unknown.as_str(), "", "a.b.c"] {
        let response =
            host.unsigned_request(Method::GET, "/api/backups").header("x-svc-proof", proof).send().await?;
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{proof}");
    }
    let two_proofs =
        host.owner_request(Method::GET, "/api/backups").header("x-svc-proof", host.proof(Route::Shell));
    assert_eq!(two_proofs.send().await?.status(), StatusCode::UNAUTHORIZED, "two proofs");
    Ok(())
}

#[tokio::test]
async fn client_headers_cannot_set_the_owner() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let forged = host
        .unsigned_request(Method::GET, &format!("/api/backups?userId={USER}"))
        .header("x-svc-user-id", USER)
        .header("cookie", format!("svc_user_id={USER}; __session={USER}"));
    assert_eq!(forged.send().await?.status(), StatusCode::UNAUTHORIZED);
    Ok(())
}

#[tokio::test]
async fn invalid_token_never_falls_back_to_other_auth() -> Result<()> {
    let mut machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.env.insert("ADMIN_TOKEN".into(), ADMIN_TOKEN.into());
    let host = machine.start()?;
    let get = |headers: &str| {
        host.send_over_socket(&format!("GET /api/backups HTTP/1.1\nhost: h\nconnection: close\n{headers}\n"))
    };
    assert!(get("")?.starts_with("HTTP/1.1 200"), "the trusted socket must authenticate the owner");
    assert!(get("x-svc-proof: a.b.c\n")?.starts_with("HTTP/1.1 401"));
    assert!(get("authorization: Bearer nonsense\n")?.starts_with("HTTP/1.1 401"));
    assert!(get("authorization: Basic eDp5\n")?.starts_with("HTTP/1.1 401"));
    assert!(get(&format!("authorization: Bearer {ADMIN_TOKEN}\n"))?.starts_with("HTTP/1.1 200"));
    assert!(
        get(&format!("authorization: Bearer {ADMIN_TOKEN}\nx-svc-proof: a.b.c\n"))?
            .starts_with("HTTP/1.1 401")
    );
    let invalid_token_with_proof = host.owner_request(Method::GET, "/api/backups").bearer_auth("nonsense");
    assert_eq!(invalid_token_with_proof.send().await?.status(), StatusCode::UNAUTHORIZED);
    let only_admin_token = host.unsigned_request(Method::GET, "/api/backups").bearer_auth(ADMIN_TOKEN);
    assert_eq!(
        only_admin_token.send().await?.status(),
        StatusCode::UNAUTHORIZED,
        "the admin token must not be accepted without a proof"
    );
    let with_proof = host.owner_request(Method::GET, "/api/backups").bearer_auth(ADMIN_TOKEN);
    assert_eq!(with_proof.send().await?.status(), StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn usage_requires_a_session_or_the_admin_token() -> Result<()> {
    let mut machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.env.insert("ADMIN_TOKEN".into(), ADMIN_TOKEN.into());
    let host = machine.start()?;
    let with_token = |host: &Host, token: &str| {
        let head = format!("authorization: Bearer {token}\nconnection: close\n");
        host.send_over_socket(&format!("GET /api/usage HTTP/1.1\nhost: h\n{head}\n"))
    };
    assert_eq!(
        host.unsigned_request(Method::GET, "/api/usage").send().await?.status(),
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(host.owner_request(Method::GET, "/api/usage").send().await?.status(), StatusCode::OK);
    let by_admin = with_token(&host, ADMIN_TOKEN)?;
    assert!(by_admin.starts_with("HTTP/1.1 200") && by_admin.contains("totalCost"), "{by_admin}");
    assert!(with_token(&host, &ADMIN_TOKEN.replace("admin", "other"))?.starts_with("HTTP/1.1 401"));

    let without_setting = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    assert!(with_token(&without_setting, ADMIN_TOKEN)?.starts_with("HTTP/1.1 401"));
    Ok(())
}

#[tokio::test]
async fn gateway_starts_but_rejects_short_admin_token() -> Result<()> {
    let short = &ADMIN_TOKEN[..31];
    let mut machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.env.insert("ADMIN_TOKEN".into(), short.into());
    let host = machine.start()?;
    let by_admin = host.owner_request(Method::GET, "/api/backups").bearer_auth(short);
    assert_eq!(by_admin.send().await?.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(
        host.owner_request(Method::GET, "/api/backups").send().await?.status(),
        StatusCode::OK,
        "the owner must still be served"
    );
    let log = host.log();
    assert!(log.contains("ADMIN_TOKEN is ignored") && !log.contains(short), "{log}");
    Ok(())
}

#[tokio::test]
async fn platform_can_read_only_usage_and_file_status() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let send = async |method: Method, path: &str, signed_path: &str| -> Result<StatusCode> {
        let mut claims = host.machine.claims(Route::Internal);
        claims.method = Some(method.to_string());
        claims.path = Some(signed_path.to_owned());
        claims.jti = Some(uuid::Uuid::new_v4().to_string());
        let proof = host.machine.signer.sign(&claims);
        Ok(host.unsigned_request(method, path).header("x-svc-proof", proof).send().await?.status())
    };
    assert_eq!(send(Method::GET, "/api/usage?groupBy=user", "/api/usage").await?, StatusCode::OK);
    let wrong_path = send(Method::GET, "/api/usage", "/_svc/internal/backup").await?;
    assert_eq!(wrong_path, StatusCode::FORBIDDEN, "a proof for another path must be rejected");
    let status = send(Method::GET, "/api/files/status", "/api/files/status").await?;
    assert_ne!(status, StatusCode::FORBIDDEN, "the platform must be able to read the file backup's status");
    for (method, path) in [
        (Method::GET, "/api/files/key"),
        (Method::GET, "/api/files/download"),
        (Method::GET, "/api/limits"),
        (Method::PUT, "/api/limits"),
        (Method::GET, "/api/interactions"),
        (Method::GET, "/api/audit"),
        (Method::GET, "/api/backups"),
        (Method::POST, "/api/dispatch"),
    ] {
        assert_eq!(send(method.clone(), path, path).await?, StatusCode::FORBIDDEN, "{method} {path}");
    }
    Ok(())
}

#[tokio::test]
async fn trusted_socket_is_limited_to_its_user_and_group() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let mode =
        |path: &std::path::Path| -> Result<u32> { Ok(std::fs::metadata(path)?.permissions().mode() & 0o777) };
    let socket = host.socket();
    let dir = socket.parent().expect("the socket has a parent directory");
    assert_eq!((mode(&socket)?, mode(dir)?), (0o660, 0o750));
    let other_users_proof_header = format!("x-svc-proof: {}\n", {
        let mut claims = host.machine.claims(Route::Shell);
        claims.sub = "user_other".parse()?;
        host.machine.signer.sign(&claims)
    });
    let response = host.send_over_socket(&format!(
        "GET /api/backups HTTP/1.1\nhost: h\nconnection: close\n{other_users_proof_header}\n"
    ))?;
    assert!(response.starts_with("HTTP/1.1 403"), "{response}");
    Ok(())
}

#[tokio::test]
async fn issuer_token_authenticates_the_owner() -> Result<()> {
    let idp = Idp::start()?;
    let mut machine = Machine::new(UNREACHABLE_DATABASE)?;
    machine.env.extend(idp.env());
    let host = machine.start()?;
    let status_with_token = async |sub: &str, options: &MintOptions| -> Result<StatusCode> {
        let token = idp.mint(sub, options);
        Ok(host.unsigned_request(Method::GET, "/api/backups").bearer_auth(token).send().await?.status())
    };
    assert_eq!(status_with_token(USER, &MintOptions::default()).await?, StatusCode::OK);
    assert_eq!(status_with_token("user_other", &MintOptions::default()).await?, StatusCode::FORBIDDEN);
    let expired = MintOptions { ttl_seconds: -120, ..MintOptions::default() };
    assert_eq!(status_with_token(USER, &expired).await?, StatusCode::UNAUTHORIZED);
    let forged = MintOptions { flaw: Some(Flaw::BadSignature), ..MintOptions::default() };
    assert_eq!(status_with_token(USER, &forged).await?, StatusCode::UNAUTHORIZED);
    let bad = idp.mint(USER, &forged);
    let with_proof = host.owner_request(Method::GET, "/api/backups").bearer_auth(bad);
    assert_eq!(
        with_proof.send().await?.status(),
        StatusCode::UNAUTHORIZED,
        "an invalid token must be rejected even with a valid proof"
    );
    let response = host.send_over_socket(&format!(
        "GET /api/backups HTTP/1.1\nhost: h\nconnection: close\nauthorization: Bearer {}\n\n",
        idp.mint("user_other", &MintOptions::default())
    ))?;
    assert!(
        response.starts_with("HTTP/1.1 403"),
        "the token must take precedence over the socket: {response}"
    );
    Ok(())
}

#[tokio::test]
async fn proof_keys_are_replaced_on_rotation() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let next = signer("k2");
    let status_with_new_key = async || -> Result<StatusCode> {
        let proof = next.sign(&host.machine.claims(Route::Shell));
        Ok(host
            .unsigned_request(Method::GET, "/api/backups")
            .header("x-svc-proof", proof)
            .send()
            .await?
            .status())
    };
    let status_with_old_key = async || status_with_proof(&host, &host.machine.claims(Route::Shell)).await;
    assert_eq!(
        (status_with_new_key().await?, status_with_old_key().await?),
        (StatusCode::UNAUTHORIZED, StatusCode::OK)
    );
    let keys = ProofKeys { keys: vec![next.public_key()] };
    host.machine.write("var/lib/svc/proof-keys.json", &serde_json::to_string(&keys)?)?;
    host.wait_until("the new key is accepted", async || Ok(status_with_new_key().await? == StatusCode::OK))
        .await?;
    assert_eq!(status_with_old_key().await?, StatusCode::UNAUTHORIZED);
    let activity = || std::fs::read_to_string(host.machine.path("home/svc/home/system/logs/activity.log"));
    host.wait_until("the key change is logged", async || {
        Ok(activity()?.contains("the platform's proof keys are now k2"))
    })
    .await?;
    host.machine.write("var/lib/svc/proof-keys.json", "{ broken")?;
    tokio::time::sleep(std::time::Duration::from_millis(1200)).await;
    assert_eq!(status_with_new_key().await?, StatusCode::OK, "the last valid keys must remain in use");
    Ok(())
}

#[tokio::test]
async fn internal_proof_is_valid_once_for_its_request() -> Result<()> {
    let host = Machine::new(UNREACHABLE_DATABASE)?.start()?;
    let path = "/_svc/internal/backup";
    let claims = |jti: &str| {
        let mut claims = host.machine.claims(Route::Internal);
        claims.method = Some("POST".into());
        claims.path = Some(path.into());
        claims.jti = Some(jti.into());
        claims
    };
    let send = async |claims: &Claims| -> Result<StatusCode> {
        let proof = host.machine.signer.sign(claims);
        Ok(host.unsigned_request(Method::POST, path).header("x-svc-proof", proof).send().await?.status())
    };
    let mut wrong_path = claims("1");
    wrong_path.path = Some("/_svc/internal/update".into());
    assert_eq!(send(&wrong_path).await?, StatusCode::FORBIDDEN);
    let mut without_jti = claims("1");
    without_jti.jti = None;
    assert_eq!(send(&without_jti).await?, StatusCode::UNAUTHORIZED);
    let request = host.machine.path("var/lib/svc/requests/backup");
    assert!(!request.exists(), "a rejected proof must not create a request");
    assert_eq!(send(&claims("1")).await?, StatusCode::ACCEPTED);
    assert!(request.exists());
    assert_eq!(send(&claims("1")).await?, StatusCode::UNAUTHORIZED, "a used proof must be rejected");
    assert_eq!(send(&claims("2")).await?, StatusCode::ACCEPTED);
    let owner = host.owner_request(Method::POST, path).send().await?;
    assert_eq!(owner.status(), StatusCode::FORBIDDEN, "the owner must not be accepted as the platform");
    Ok(())
}

#[tokio::test]
async fn dev_identity_works_only_where_permitted() -> Result<()> {
    let mut machine = Machine::new(UNREACHABLE_DATABASE)?;
    for name in ["SVC_MACHINE_ID", "SVC_USER_ID", "SVC_HANDLE", "SVC_EPOCH", "SVC_PROOF_KEYS"] {
        machine.env.remove(name);
    }
    let output = machine.run_to_end()?;
    assert_eq!(output.status.code(), Some(78), "there must be no default identity");
    for (name, value) in
        [("GATEWAY_AUTH", "off"), ("SVC_PRODUCTION", "false"), ("SVC_ENVIRONMENT", "development")]
    {
        machine.env.insert(name.into(), value.into());
    }
    let changes = [
        ("SVC_PRODUCTION", "true"),
        ("SVC_ENVIRONMENT", "production"),
        ("SVC_USER_ID", USER),
        ("GATEWAY_LISTEN", "0.0.0.0:0"),
    ];
    for (name, value) in changes {
        let previous = machine.env.insert(name.into(), value.into());
        let output = machine.run_to_end()?;
        assert_eq!(output.status.code(), Some(78), "{name}={value}");
        match previous {
            Some(previous) => machine.env.insert(name.into(), previous),
            None => machine.env.remove(name),
        };
    }
    let host = machine.start()?;
    assert_eq!(host.unsigned_request(Method::GET, "/api/backups").send().await?.status(), StatusCode::OK);
    let forged = host.unsigned_request(Method::GET, "/api/backups").header("x-svc-proof", "a.b.c");
    assert_eq!(
        forged.send().await?.status(),
        StatusCode::UNAUTHORIZED,
        "an invalid proof must never be ignored"
    );
    Ok(())
}
