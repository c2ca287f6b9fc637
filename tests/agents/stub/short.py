"""short.py [LENGTH] < X.stdout.jsonl: prints a shortened recording, without its less interesting fields"""
import sys,json
L=int(sys.argv[1]) if len(sys.argv)>1 else 1300
for l in sys.stdin:
    try: d=json.loads(l)
    except ValueError: print('RAW', l[:L].rstrip()); continue
    if not isinstance(d,dict) or 'type' not in d: print(json.dumps(d)[:L]); continue
    if d.get('subtype')=='init': print('INIT', d['model'], d['session_id'], d['permissionMode']); continue
    if d['type']=='result':
        d={k:v for k,v in d.items() if k not in ('subagent_stats','uuid','model_usage_since_last_result','fast_mode_state','fast_mode_disabled_reason') and not k.startswith('ttft')}
        u=d.get('usage') or {}; d['usage']=[u.get('input_tokens'),u.get('cache_creation_input_tokens'),u.get('cache_read_input_tokens'),u.get('output_tokens')]
        d['modelUsage']={m:{k:x[k] for k in ('inputTokens','outputTokens','costUSD','costBasis','canonicalModel') if k in x} for m,x in (d.get('modelUsage') or {}).items()}
    if d['type'] in('assistant','user') and isinstance(d.get('message'),dict):
        d={k:v for k,v in d.items() if k not in ('uuid','session_id','timestamp','request_id','tool_result_meta')}
        d['message']={k:v for k,v in d['message'].items() if k in('content','model')}
    if d['type']=='system': d={k:v for k,v in d.items() if k not in('uuid','session_id')}
    print(json.dumps(d)[:L])
