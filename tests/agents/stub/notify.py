import sys
open(sys.argv[1] + ".notify.jsonl", "a").write(sys.argv[-1] + "\n")
